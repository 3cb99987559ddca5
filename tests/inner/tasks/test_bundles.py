"""Gradients of many weights are found for several groups at once, and stay what they are."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks import engines
from convoy.inner.tasks.capture import capture
from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.engine import find_hands
from convoy.inner.tasks.instructions import Instruction, Program
from convoy.inner.tasks.program import write_program
from convoy.inner.tasks.step import Grain
from tests.inner.tasks.nets import CLASSES, SHAPE, gradients_of, make_batch, make_twins, threads

_aten = torch.ops.aten
_WIDE = 144  # channels: their gradient is found in parts, too


def _thick() -> nn.Module:
    """Return a network whose second convolution has many weights and small images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, _WIDE, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(_WIDE),
        nn.ReLU(),
        nn.Conv2d(_WIDE, _WIDE, 3, padding=1),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(_WIDE, CLASSES),
    )


class _Twice(nn.Module):
    """The same weights on a large image and on a small one: their sums could go together unlike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, _WIDE, 1)
        self.twice = nn.Conv2d(_WIDE, _WIDE, 3, padding=1)
        self.last = nn.Linear(_WIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.stem(x)))
        x = self.twice(nn.functional.avg_pool2d(x, 4))
        logits: Tensor = self.last(x.mean((2, 3)))
        return logits


def _program(model: nn.Module, groups: int) -> Program:
    arithmetic = Arithmetic(torch.device("cpu"), "fp64")
    recording = capture(arithmetic.place(model), arithmetic, SHAPE)
    return write_program(decompose(recording), [2] * groups, None)


def _gradients(program: Program, weight: str) -> list[Instruction]:
    """Return the instructions that find a convolution's gradient."""
    return [
        i
        for i in program.instructions
        if i.op is _aten.convolution_backward.default
        and program.inputs[f"p:{weight}"] in i.reads
        and i.args[-1][1]
    ]


def test_groups_go_together_where_weights_are_many() -> None:
    program = _program(_thick(), 8)
    wide, narrow = _gradients(program, "3.weight"), _gradients(program, "0.weight")
    assert len(narrow) == 8
    assert 1 < len(wide) < 8
    for together in wide:  # one task each: the samples of some groups, and their gradient
        assert together.group == -1
        cats = [i for i in program.instructions if i.tile == together.tile and i is not together]
        assert {i.op for i in cats} == {_aten.cat.default}


def test_sums_that_meet_another_one_stay_apart() -> None:
    found = [i for i in _program(_Twice(), 4).instructions if i.layer == "twice"]
    assert not any(i.op is _aten.cat.default for i in found)


@pytest.mark.parametrize("make", [_thick, _Twice])
def test_gradients_are_those_of_plain_pytorch(make: Any) -> None:
    twins = make_twins(make(), Grain(1, 1))
    for groups, count in itertools.product((2, 3, 5), (1, 3)):
        twins.tasks.use(Grain(groups, count))
        twins.pool = count
        twins.gradients(make_batch(groups, 11))
    assert twins.told == []


@pytest.mark.parametrize("norms", ["batch", "group"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_threads_gives_the_same_bits(precision: str, norms: Any) -> None:
    """Also where sums are rounded afterwards, and where a group has statistics of its own."""
    found = []
    for count in (1, 3):
        grain = Grain(4, count, norms=norms)
        twins = make_twins(
            _thick(), grain, precision=precision, layout="channels_last", tolerance=1
        )
        with threads(count):
            twins.tasks.gradients(make_batch(0, 12, SHAPE, torch.float32), 12)
        assert twins.told == []
        found.append(gradients_of(twins.tasks.model))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.parametrize(
    ("precision", "tiles", "tolerance"),
    [("fp32", False, 1e-5), ("bf16", False, 0.03), ("bf16", True, 0.03)],
)
def test_our_own_convolutions_find_gradients_of_several_groups(
    precision: str, tiles: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands(find_hands().lanes, tiles)
    monkeypatch.setattr(engines, "find_hands", lambda: hands)
    twins = make_twins(
        _thick(), Grain(4, 2), precision=precision, layout="channels_last", tolerance=tolerance
    )
    twins.gradients(make_batch(0, 12, SHAPE, torch.float32))
    assert twins.told == []
