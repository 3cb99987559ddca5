"""Keeps engines from writing to the terminal what reaches us as exceptions anyway."""

import os


def quiet_engines() -> None:
    """Ask torchft and gloo for silence; both read this once, when they are first imported."""
    os.environ.setdefault("RUST_LOG", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
