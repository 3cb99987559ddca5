"""Parts of networks go forward and back as tasks: PyTorch's numbers, several batches at a time."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.capture import capture_passes
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.passes import TaskPasses
from convoy.inner.tasks.program import write_program
from convoy.inner.tasks.step import Grain, Step
from convoy.inner.tasks.tasks import ERROR, FORWARD, GRADIENTS, dependencies, sections_of
from convoy.models.blocks import walk_units
from convoy.models.zoo import build_model
from convoy.pipeline.passes import EagerPasses
from convoy.randomness import sample_keys
from tests.inner.tasks.nets import TOLERANCE, assert_same, gradients_of, inception, threads

_SHAPES = {"lenet5": (1, 28, 28), "alexnet": (3, 32, 32), "vgg16": (3, 32, 32)}


def _way(precision: str, layout: str = "channels_last") -> Arithmetic:
    return Arithmetic(torch.device("cpu"), precision, layout)


@dataclass(eq=False)
class Pair:
    """The same part twice: by PyTorch and as tasks."""

    plain: nn.Module
    part: nn.Module
    eager: EagerPasses
    tasks: TaskPasses
    told: list[str]
    tolerance: float


def _pair(
    part: nn.Module,
    way: Arithmetic,
    grain: Grain = Grain(3, 1),  # noqa: B008 - it is frozen
    *,
    is_first: bool = False,
    portable: bool = False,
) -> Pair:
    plain, part = copy.deepcopy(part).train(), part.train()
    eager, backup = (
        EagerPasses(net, way, is_first=is_first, postpones=False) for net in (plain, part)
    )
    told: list[str] = []
    tasks = TaskPasses(
        part,
        way,
        backup,
        wants_error=not is_first,
        grain=grain,
        tell=told.append,
        portable=portable,
    )
    return Pair(plain, part, eager, tasks, told, TOLERANCE[way.precision])


def _blocks(name: str, way: Arithmetic, start: int, stop: int) -> tuple[nn.Module, Tensor]:
    """Return some blocks of a network of the zoo, and what goes into them of ten samples."""
    shape = _SHAPES.get(name, (3, 16, 16))
    model = way.place(build_model(name, shape, 10, seed=0)).eval()
    blocks = [block for _, block in walk_units(model)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, *shape, generator=generator).to(way.dtype)
    with torch.no_grad():
        x = nn.Sequential(*blocks[:start])(x.to(memory_format=way.memory_format))
    return nn.Sequential(*blocks[start:stop]), x


def _weights(part: nn.Module, number: int) -> list[Tensor]:
    """Return what a stage hands over: a weight for each that is trained."""
    trained = (p for p in part.parameters() if p.requires_grad)
    return [p.detach() * (1 + 0.01 * number) for p in trained]


def _compare(pair: Pair, xs: Sequence[Tensor], lead: int, *, own: bool = True) -> None:
    """Let batches through both, so many ahead of those that go back, and compare everything."""
    held = []
    for number in range(len(xs) + lead):
        if number < len(xs):
            x = xs[number]
            keys = sample_keys(0, number, torch.arange(len(x)))
            given = [[w.clone() for w in _weights(pair.plain, number)] for _ in range(2)]
            theirs = pair.eager.forward(x, keys, given[0] if own else None)
            ours = pair.tasks.forward(x, keys, given[1] if own else None)
            assert_same({"y": ours[0]}, {"y": theirs[0]}, pair.tolerance)
            held.append((theirs, ours))
        if number < lead:
            continue
        (y, theirs_held), (_, ours_held) = held[number - lead]
        flow = torch.randn(y.shape, generator=torch.Generator().manual_seed(number)).to(y.dtype)
        dx, ours_dx = pair.eager.backward(theirs_held, flow), pair.tasks.backward(ours_held, flow)
        pair.eager.gradients(theirs_held)
        pair.tasks.gradients(ours_held)
        assert (dx is None) == (ours_dx is None)
        if dx is not None and ours_dx is not None:
            assert_same({"dx": ours_dx}, {"dx": dx}, pair.tolerance)
        assert_same(gradients_of(pair.part), gradients_of(pair.plain), pair.tolerance)
    assert_same(dict(pair.part.named_buffers()), dict(pair.plain.named_buffers()), pair.tolerance)
    assert pair.told == []
    assert pair.tasks.why_not is None


def _batches(x: Tensor) -> list[Tensor]:
    """Return batches like one, of which the last is short."""
    return [x, x * 0.9, x * 1.1, x * 0.8, x[:4] * 1.2, x[:4]]


@pytest.mark.parametrize(
    ("name", "start", "stop", "lead"),
    [
        *(
            (*part, lead)
            for part in [
                ("resnet20", 0, 4),
                ("resnet20", 4, 7),
                ("resnet20", 7, 11),
                ("lenet5", 0, 2),
                ("lenet5", 1, 5),
            ]
            for lead in (0, 1, 3)
        ),
        ("alexnet", 3, 8, 1),  # with layers that are large: once will do
        ("vgg16", 2, 5, 1),
    ],
)
def test_parts_of_the_zoo_give_pytorchs_numbers(
    name: str, start: int, stop: int, lead: int
) -> None:
    way = _way("fp64")
    part, x = _blocks(name, way, start, stop)
    pair = _pair(part, way, is_first=start == 0)
    _compare(pair, _batches(x), lead, own=lead > 0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("grain", [Grain(1, 1), Grain(4, 2), Grain(5, 3)])
def test_branches_and_dropouts_any_cut_any_layout(grain: Grain, layout: str) -> None:
    way = _way("fp64", layout)
    part = nn.Sequential(way.place(inception()))
    x = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    with threads(grain.threads):
        _compare(_pair(part, way, grain), _batches(x.to(memory_format=way.memory_format)), 2)


def test_without_a_compiler_the_numbers_are_the_same() -> None:
    way = _way("fp64")
    part, x = _blocks("resnet20", way, 3, 6)
    _compare(_pair(part, way, portable=True), _batches(x), 2)


def test_in_fp32_with_our_own_convolutions() -> None:
    """Smooth, so that rounding flips no sign; wide enough for the kernels of our own."""
    torch.manual_seed(0)
    way = _way("fp32")
    layers: list[nn.Module] = [nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)]
    layers += [nn.Tanh(), nn.Conv2d(32, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    part = way.place(nn.Sequential(*layers))
    x = torch.randn(10, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    _compare(_pair(part, way), _batches(x.to(memory_format=torch.channels_last)), 2)


def _bits(count: int) -> list[Tensor]:
    way = _way("fp32")
    part, x = _blocks("resnet20", way, 3, 6)
    with threads(count):
        pair = _pair(part, way, Grain(4, count))
        passed = [pair.tasks.forward(value, None, None) for value in _batches(x)[:2]]
        found = [y for y, _ in passed]
        for y, held in passed:
            error = pair.tasks.backward(held, torch.ones_like(y))
            assert error is not None
            pair.tasks.gradients(held)
            found += [error, *gradients_of(pair.part).values()]
    assert pair.told == []
    return found


def test_bits_are_the_same_each_time_on_any_number_of_threads() -> None:
    first = _bits(1)
    for count in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(_bits(count), first, strict=True))


def test_weights_that_move_in_between_change_nothing() -> None:
    way = _way("fp64")
    part, x = _blocks("resnet20", way, 3, 6)
    pair = _pair(part, way)
    own = _weights(part, 1)
    y, held = pair.eager.forward(x, None, [w.clone() for w in own])
    _, ours = pair.tasks.forward(x, None, own)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.fill_(7.0)
    flow = torch.ones_like(y)
    dx, found = pair.eager.backward(held, flow), pair.tasks.backward(ours, flow)
    assert dx is not None
    assert found is not None
    assert_same({"dx": found}, {"dx": dx}, pair.tolerance)
    pair.eager.gradients(held)
    pair.tasks.gradients(ours)
    assert_same(gradients_of(part), gradients_of(pair.plain), pair.tolerance)


def test_what_is_not_on_its_way_holds_no_batch_and_no_weights() -> None:
    way = _way("fp64")
    part, x = _blocks("resnet20", way, 3, 6)
    pair = _pair(part, way)
    seen: list[weakref.ref[Tensor]] = []
    held = []
    for batch in (x.clone(), x.clone(), x[:4].clone()):
        own = _weights(part, 1)
        y, passage = pair.tasks.forward(batch, None, own)
        seen += [weakref.ref(tensor) for tensor in (batch, y, *own)]
        held.append((y, passage))
    del batch, own
    while held:
        y, passage = held.pop()
        flow = torch.ones_like(y)
        error = pair.tasks.backward(passage, flow)
        assert error is not None
        seen += [weakref.ref(tensor) for tensor in (flow, error)]
        pair.tasks.gradients(passage)
        del y, passage, flow, error
    gc.collect()
    assert pair.told == []
    assert [ref for ref in seen if ref() is not None] == []


# ---------------------------------------------------------------- sections


class _Counting(nn.Module):
    """Counts its batches in a buffer that its next pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        return x * self.weight * self.seen.clone()


def test_a_forward_pass_leaves_buffers_for_the_next_one() -> None:
    way = _way("fp64")
    part = nn.Sequential(way.place(_Counting()), nn.Flatten(), way.place(nn.Linear(4, 2)))
    x = torch.ones(6, 1, 2, 2).double()
    _compare(_pair(part, way, Grain(2, 1)), [x, x, x, x], 2)
    assert part.state_dict()["0.seen"] == 4


def test_what_the_stage_before_waits_for_needs_no_gradient_of_a_weight() -> None:
    way = _way("fp64")
    part, x = _blocks("resnet20", way, 3, 6)
    recording = capture_passes(part.train(), way, x, wants_error=True)
    program = write_program(decompose(recording), (5, 5), None)
    sections = sections_of(program, dependencies(program.instructions))
    kinds: dict[int, set[str]] = {section: set() for section in (FORWARD, ERROR, GRADIENTS)}
    for section, instruction in zip(sections, program.instructions, strict=True):
        kinds[section].add(instruction.kind)
    assert not kinds[FORWARD] & {"error", "gradient"}
    assert "error" in kinds[ERROR]
    assert "gradient" not in kinds[ERROR]
    assert "gradient" in kinds[GRADIENTS]
    gradients = {slot for name, slot in program.inputs.items() if name.startswith("g:")}
    for section, instruction in zip(sections, program.instructions, strict=True):
        if gradients.intersection(instruction.writes):
            assert section == GRADIENTS


# ---------------------------------------------------------------- what cannot be done


def _deciding(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.function(x))
        return found


def _frozen() -> nn.Module:
    part = _Function(torch.tanh)
    part.layer.bias.requires_grad_(False)
    return part


@pytest.mark.parametrize("own", [False, True], ids=["present", "own"])
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (_Function(_deciding), "it decides by the values it computes"),
        (_Function(lambda x: x - x.amax(0)), "mixes samples"),
        (_frozen(), "some of its weights are frozen"),
        (nn.Tanh(), "it has no weights"),
    ],
    ids=["decides", "mixes", "frozen", "no weights"],
)
def test_what_cannot_be_tasks_is_told_once_and_computed_by_pytorch(
    part: nn.Module, reason: str, own: bool
) -> None:
    torch.manual_seed(0)
    way = _way("fp64")
    pair = _pair(way.place(copy.deepcopy(part)), way)
    for number in range(2):
        x = torch.randn(6, 4).double()
        given = [_weights(pair.plain, number) if own else None for _ in range(2)]
        y, held = pair.eager.forward(x, None, given[0])
        ours, ours_held = pair.tasks.forward(x, None, given[1])
        assert torch.equal(y, ours)
        dx, found = (
            passes.backward(passage, torch.ones_like(y))
            for passes, passage in ((pair.eager, held), (pair.tasks, ours_held))
        )
        assert dx is not None
        assert found is not None
        assert torch.equal(dx, found)
        pair.eager.gradients(held)
        pair.tasks.gradients(ours_held)
        for a, b in zip(pair.plain.parameters(), pair.part.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or (b.grad is not None and torch.equal(a.grad, b.grad))
    (sentence,) = pair.told
    assert reason in sentence
    assert sentence.startswith("this stage cannot be run as tasks: ")
    assert sentence.endswith("; it is computed by 'eager'")


def test_what_would_go_wrong_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind for itself: what is passed back is small beside a part's other gradients."""
    run = Step.run

    def spoilt(what: str) -> Callable[..., None]:
        def run_and_spoil(step: Step, tensors: dict[str, Tensor], section: int = FORWARD) -> None:
            run(step, tensors, section)
            if section == FORWARD and what == "results":
                step.logits.mul_(0.5)
            if section == GRADIENTS and what == "error" and step.error is not None:
                step.error.zero_()

        return run_and_spoil

    way = _way("fp32")
    part, x = _blocks("alexnet", way, 3, 8)
    for what in ("results", "error"):
        monkeypatch.setattr(Step, "run", spoilt(what))
        pair = _pair(part, way)
        pair.tasks.forward(x, None, None)
        assert pair.tasks.why_not == f"its {what} would differ from PyTorch's"


def test_a_batch_that_fails_later_is_computed_by_pytorch_and_those_on_their_way_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = _way("fp64")
    part, x = _blocks("resnet20", way, 3, 6)
    pair = _pair(part, way)
    before, held_before = pair.tasks.forward(x, None, None)
    theirs, held_theirs = pair.eager.forward(x, None, None)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pair.tasks, "_measured", fail)
    buffers = {name: buffer.clone() for name, buffer in part.named_buffers()}
    y, held = pair.tasks.forward(x[:4], None, None)
    assert any(not torch.equal(b, buffers[n]) for n, b in part.named_buffers())
    assert pair.told == [
        "this stage cannot be run as tasks: out of memory; it is computed by 'eager'"
    ]
    assert_same({"y": before}, {"y": theirs}, pair.tolerance)
    dx = pair.eager.backward(held_theirs, torch.ones_like(theirs))
    found = pair.tasks.backward(held_before, torch.ones_like(theirs))
    assert dx is not None
    assert found is not None
    assert_same({"dx": found}, {"dx": dx}, pair.tolerance)
    pair.tasks.gradients(held_before)
    assert pair.tasks.backward(held, torch.ones_like(y)) is not None
    pair.tasks.gradients(held)
