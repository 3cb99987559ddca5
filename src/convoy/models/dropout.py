"""Dropout that belongs to the sample: the same mask whichever node computes it.

Torch's dropout reads a global generator, so a mask would depend on who does the work and on
what was drawn before. Here it is a function of (sample key, layer, neuron), and a resumed or
redistributed run draws the same masks with no generator state to save.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from convoy.randomness import draw_uniform

_FIRST_STREAM = 16  # below lie the streams of augmentation
_STREAMS_PER_LAYER = 64


class Draws:
    """The keys of a batch, and how often each layer has drawn from them.

    Attributes:
        keys: of the samples that pass now.
        first: the number of the first neuron that is here; nodes may have some of a layer each.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.first = 0
        self._calls: Counter[int] = Counter()

    def next_stream(self, layer: int) -> int:
        """Return a stream of its own for each use of a layer within one forward pass."""
        self._calls[layer] += 1
        return _FIRST_STREAM + layer * _STREAMS_PER_LAYER + self._calls[layer]


_draws: ContextVar[Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drop_by(keys: Tensor | None) -> Iterator[Draws | None]:
    """Let the dropout layers below take their masks from these sample keys."""
    draws = None if keys is None else Draws(keys)
    token = _draws.set(draws)
    try:
        yield draws
    finally:
        _draws.reset(token)


class SampleDropout(nn.Module):
    """Dropout by sample keys; whole channels where `channelwise`.

    Without keys (outside Convoy's own training) it is torch's dropout.
    """

    def __init__(self, p: float, layer: int, *, channelwise: bool = False) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        """Zero a part p of the inputs and scale the rest up."""
        if not self.training or self.p == 0:
            return x
        draws = _draws.get()
        if draws is None:
            plain = nn.functional.dropout2d if self.channelwise else nn.functional.dropout
            return plain(x, self.p)
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] if self.channelwise else x.shape
        places = shape[1:].numel()
        stream = draws.next_stream(self.layer)
        kept = draw_uniform(draws.keys, stream, places, draws.first) >= self.p
        mask = kept.view(*shape, *[1] * (x.ndim - len(shape))).to(x.dtype)
        return x * (mask / (1 - self.p))

    def extra_repr(self) -> str:
        """Describe the layer as torch's own does."""
        return f"p={self.p}, layer={self.layer}, channelwise={self.channelwise}"


def key_dropout(model: nn.Module) -> nn.Module:
    """Replace every torch dropout of a network, in place, by one that goes by sample keys."""
    found = _layers(model, (nn.Dropout, nn.Dropout2d))
    for layer, (parent, name, child) in enumerate(found):
        channelwise = isinstance(child, nn.Dropout2d)
        setattr(parent, name, SampleDropout(child.p, layer, channelwise=channelwise))
    return model


def torch_dropout(model: nn.Module) -> nn.Module:
    """Replace it by torch's own again, in place: for who trains without sample keys."""
    for parent, name, child in _layers(model, (SampleDropout,)):
        setattr(parent, name, (nn.Dropout2d if child.channelwise else nn.Dropout)(child.p))
    return model


def _layers(model: nn.Module, kinds: tuple[type, ...]) -> list[tuple[nn.Module, str, Any]]:
    """Return the layers of some kinds, each with the module that it is a part of."""
    return [
        (parent, name, child)
        for parent in model.modules()
        # Not named_children, which leaves out a module's second use.
        for name, child in parent._modules.items()
        if isinstance(child, kinds)
    ]
