"""Keeps engines from writing to the terminal what reaches us as exceptions anyway."""

import os


def quiet_engines() -> None:
    """Ask torchft, gloo and gRPC for silence; they read this once, when first imported."""
    os.environ.setdefault("RUST_LOG", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
