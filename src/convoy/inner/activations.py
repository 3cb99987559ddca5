"""What a forward pass keeps until its backward pass, counted in bytes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.borrow import borrow
from convoy.models.dropout import drop_by

_SAMPLES = 8  # a batch: what is kept of no single sample is a small part of it


class Kept:
    """Tensors that autograd has saved, each counted once however many operations save it."""

    def __init__(self, not_these: Iterable[Tensor]) -> None:
        self._others = {tensor.untyped_storage().data_ptr() for tensor in not_these}
        self._found: dict[int, Tensor] = {}  # held, so that no other tensor comes to lie there

    @property
    def num_bytes(self) -> int:
        """Return how much it is so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())

    def note(self, tensor: Tensor) -> Tensor:
        """Take a tensor that autograd saves."""
        where = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach()  # with its graph it would keep the graph alive, for ever
        if where not in self._others:
            self._found.setdefault(where, tensor)
        return tensor


@contextmanager
def count_kept(weights: Iterable[Tensor]) -> Iterator[Kept]:
    """Count what is saved meanwhile, besides the weights, which are there anyway."""
    kept = Kept(weights)
    with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        yield kept


def kept_of_a_sample(net: nn.Module, shape_chw: tuple[int, ...], arithmetic: Arithmetic) -> int:
    """Return the bytes that a network keeps of a sample; the network is left as it was."""
    images = torch.zeros(_SAMPLES, *shape_chw, device=arithmetic.device, dtype=arithmetic.dtype)
    images = images.to(memory_format=arithmetic.memory_format)
    keys = torch.zeros(_SAMPLES, dtype=torch.int64, device=arithmetic.device)
    counting = count_kept(net.parameters())
    with borrow(net), counting as kept, drop_by(keys), arithmetic.autocast():
        net(images)
    return kept.num_bytes // _SAMPLES
