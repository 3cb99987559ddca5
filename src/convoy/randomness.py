"""Random numbers that belong to a sample, not to the process that happens to draw them.

A sample's key is a 64-bit hash of (seed, epoch, sample index). Whatever is random about the
sample (crop, flip, dropout) is read from its key, so any node that gets the sample, on any
device, draws the same numbers. The hash is the finaliser of SplitMix64 in wrapping 64-bit
arithmetic, which CPU and CUDA do alike.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def fold(*numbers: int) -> int:
    """Hash whole numbers into one 63-bit seed.

    >>> fold(0, 1) == fold(0, 1), fold(0, 1) == fold(1, 0)
    (True, False)
    """
    state = 0
    for number in numbers:
        state = _mix((state + number + 1) * _GOLDEN & _MASK)
    return state >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as if unsigned: int64's own shift copies the sign bit in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Return one 64-bit key for each sample index of an epoch."""
    base = _signed(fold(seed, epoch) * _GOLDEN)
    return _mix_tensor(indices.to(torch.int64) * _signed(_GOLDEN) + base)


def draw_below(keys: Tensor, stream: int, bound: int) -> Tensor:
    """Draw a whole number in [0, bound) from each key; streams are independent."""
    mixed = _mix_tensor(keys + _signed((stream + 1) * _GOLDEN))
    # 31 high bits: a plain remainder is then off from uniform by less than bound / 2^31.
    return _shift_right(mixed, 33) % bound


def draw_uniform(keys: Tensor, stream: int, count: int, first: int = 0) -> Tensor:
    """Draw `count` floats in [0, 1) from each key, as a (len(keys), count) tensor.

    They are numbered; those from `first` on are the same whoever draws them.
    """
    numbers = torch.arange(first, first + count, device=keys.device, dtype=torch.int64)
    places = numbers * _signed(_GOLDEN)
    lanes = _mix_tensor(keys + _signed(fold(stream) * _GOLDEN))
    bits = _shift_right(_mix_tensor(lanes[:, None] + places[None, :]), 40)
    return bits.to(torch.float32) * (1.0 / (1 << 24))


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """Return the order in which an epoch visits the samples: a seeded permutation."""
    generator = torch.Generator().manual_seed(fold(seed, epoch, 1))
    return torch.randperm(count, generator=generator)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's own generator, for whatever in a user's network still draws from it.

    Done at each step, so that nothing depends on where a run was resumed. Not by
    `torch.manual_seed`, which looks for every kind of accelerator and takes 100 us.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
