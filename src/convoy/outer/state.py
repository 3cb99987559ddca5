"""A job's whole state as one block of bytes that another process can take over, without pickle.

The block is a safetensors file in memory: weights, batch-norm statistics and momentum by name,
and in its header the progress of the training, as JSON.
"""

import json
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from convoy.errors import CheckpointError
from convoy.storage.checkpoint import Checkpoint

_MODEL, _MOMENTUM = "model/", "momentum/"
_DAMAGE = (  # what reading a damaged block can end in
    SafetensorError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
_HEADER_LENGTH_BYTES = 8  # what a safetensors file begins with: the length of its header
_HEADER_AT_MOST = 16 << 20  # a header that says it is longer is not believed


def pack(checkpoint: Checkpoint) -> bytes:
    """Turn a checkpoint into one block of bytes."""
    tensors = {
        **{_MODEL + name: tensor for name, tensor in checkpoint.model.items()},
        **{_MOMENTUM + name: tensor for name, tensor in checkpoint.momentum.items()},
    }
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    header = {
        "step": checkpoint.step,
        "progress": checkpoint.progress,
        "identity": checkpoint.identity,
        "score": checkpoint.score,
    }
    return safetensors.torch.save(plain, metadata={"convoy": json.dumps(header)})


def unpack(block: bytes) -> Checkpoint:
    """Read what `pack` wrote.

    Raises:
        CheckpointError: the block is damaged or is something else.
    """
    try:
        tensors = safetensors.torch.load(block)
        header = json.loads(_read_metadata(block)["convoy"])
        if not isinstance(header["progress"], dict) or not isinstance(header["identity"], dict):
            raise ValueError("progress and identity must be records")
        return Checkpoint(
            step=int(header["step"]),
            model=_part(tensors, _MODEL),
            momentum=_part(tensors, _MOMENTUM),
            progress=header["progress"],
            identity=header["identity"],
            score=header["score"],
        )
    except _DAMAGE as error:
        raise CheckpointError(f"the state that was received is damaged: {error}") from error


def as_tensor(block: bytes) -> Tensor:
    """Return a block as a tensor of bytes, for a process group to send."""
    return torch.frombuffer(bytearray(block), dtype=torch.uint8)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _read_metadata(block: bytes) -> dict[str, Any]:
    """Read the header's free part, which safetensors itself reads from files only."""
    length = int.from_bytes(block[:_HEADER_LENGTH_BYTES], "little")
    if length > min(len(block), _HEADER_AT_MOST):
        raise ValueError("its header is longer than it can be")
    header = json.loads(block[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + length])
    metadata: dict[str, Any] = header["__metadata__"]
    return metadata
