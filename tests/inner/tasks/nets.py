"""Networks and batches for the tests of tasks, and each network twice: plain and as tasks."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Sums
from convoy.inner.optimizer import make_optimizer, momentum_tensors
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.tasks.step import Grain
from convoy.models.dropout import key_dropout
from convoy.randomness import sample_keys

SHAPE, CLASSES = (3, 8, 8), 4
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
_FLOOR = 1e-3  # a tensor is compared at least on this scale, relative to the largest


def chain(*, norm: bool = True, dropout: bool = False) -> nn.Module:
    """Return a small network without branches; smooth, so that rounding flips no sign."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 5, 3)]
    layers += [nn.BatchNorm2d(5)] if norm else []
    layers += [nn.Tanh(), nn.Conv2d(5, 6, 3, stride=2), nn.Flatten()]
    layers += [nn.Dropout(0.4)] if dropout else []
    return key_dropout(nn.Sequential(*layers, nn.Linear(24, CLASSES)))


class Inception(nn.Module):
    """Branches that are put side by side, a shortcut, norms of two kinds, two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.one = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.three = nn.Sequential(
            nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False), nn.ReLU(inplace=True)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(8, 5, 1))
        self.mix = nn.Sequential(nn.Conv2d(15, 8, 1), nn.BatchNorm2d(8, momentum=0.3))
        self.drop = nn.Dropout2d(0.2)
        self.last = nn.Sequential(
            nn.Linear(8 * 16, 10),
            nn.BatchNorm1d(10),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(10, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        branches = torch.cat([self.one(x), self.three(x), self.pooled(x)], 1)
        x = functional.relu(self.mix(self.drop(branches)) + x)
        logits: Tensor = self.last(functional.avg_pool2d(x, 2).flatten(1))
        return logits


class Hourglass(nn.Module):
    """Goes down and up again, with gates, weights that are used twice, and norms of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.side = nn.Conv2d(3, 4, 1)
        self.rows = nn.LayerNorm(8)
        self.slope = nn.PReLU(8)
        self.gain = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.last = nn.Linear(4 * 16, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low = functional.silu(self.norm(self.down(x)))
        low = self.deep(functional.gelu(self.deep(low))) * self.gain + low
        low = functional.interpolate(functional.avg_pool2d(low, 2), scale_factor=2.0)
        both = self.slope(torch.cat([self.up(low), self.side(x)], 1))
        value, gate = self.rows(both.movedim(1, -1)).movedim(-1, 1).chunk(2, 1)
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        mixed = functional.adaptive_avg_pool2d(value * torch.sigmoid(gate), 4)
        logits: Tensor = self.last(mixed.flatten(1))
        return logits


def inception() -> nn.Module:
    torch.manual_seed(0)
    return key_dropout(Inception())


def hourglass() -> nn.Module:
    torch.manual_seed(0)
    return Hourglass()


def make_batch(
    number: int,
    count: int = 10,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(count, *shape, dtype=torch.float64, generator=generator).to(dtype)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return Batch(images, labels, sample_keys(0, number, torch.arange(count)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch's pool have so many threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    """Compare all numbers together and each tensor for itself."""
    assert ours.keys() == theirs.keys()
    real = [name for name, tensor in theirs.items() if tensor.is_floating_point()]
    for name in theirs.keys() - set(real):
        assert torch.equal(ours[name], theirs[name]), name
    off = {name: float((ours[name].double() - theirs[name].double()).norm()) for name in real}
    size = {name: float(theirs[name].double().norm()) for name in real}
    floor = _FLOOR * max(size.values(), default=0.0)
    for name in real:
        assert ours[name].shape == theirs[name].shape
        assert off[name] <= tolerance * max(size[name], floor), (name, off[name], size[name])
    whole = sum(value**2 for value in size.values()) ** 0.5
    assert sum(value**2 for value in off.values()) ** 0.5 <= tolerance * whole


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


@dataclass(eq=False)
class Twins:
    """The same network twice: one trained operation by operation, one as tasks."""

    plain: EagerExecutor
    tasks: TasksExecutor
    pool: int
    tolerance: float
    told: list[str] = field(default_factory=list)

    def gradients(self, batch: Batch) -> None:
        """Compare the gradients of a batch."""
        theirs = self.plain.gradients(batch, len(batch))
        with threads(self.pool):
            ours = self.tasks.gradients(batch, len(batch))
        self._compare(ours, theirs)
        assert_same(gradients_of(self.tasks.model), gradients_of(self.plain.model), self.tolerance)

    def update(self, rate: float) -> None:
        self.plain.update(rate)
        self.tasks.update(rate)

    def step(self, batch: Batch, rate: float = 0.05) -> None:
        """Do a step with both."""
        theirs = self.plain.step(batch, len(batch), rate)
        with threads(self.pool):
            ours = self.tasks.step(batch, len(batch), rate)
        self._compare(ours, theirs)

    def _compare(self, ours: Sums, theirs: Sums) -> None:
        assert ours.count == theirs.count
        assert ours.logits is not None
        assert theirs.logits is not None
        assert not ours.logits.requires_grad
        one, other = ({"loss": s.loss, "logits": s.logits} for s in (ours, theirs))
        assert_same(one, other, self.tolerance)  # type: ignore[arg-type]

    def assert_equal(self) -> None:
        """Compare weights, statistics and momentum."""
        mine, theirs = self.tasks, self.plain
        assert_same(mine.model.state_dict(), theirs.model.state_dict(), self.tolerance)
        assert_same(
            momentum_tensors(mine.optimizer, mine.model),
            momentum_tensors(theirs.optimizer, theirs.model),
            self.tolerance,
        )


def make_twins(
    model: nn.Module,
    grain: Grain | None = Grain(3, 2),  # noqa: B008 - it is frozen
    *,
    precision: str = "fp64",
    layout: str = "contiguous",
    smoothing: float = 0.0,
    portable: bool = False,
    tolerance: float | None = None,
    **options: Any,
) -> Twins:
    arithmetic = Arithmetic(torch.device("cpu"), precision, layout)
    one = arithmetic.place(model)
    two = copy.deepcopy(one)
    plain = EagerExecutor(
        one, make_optimizer(one, Config(**options)), arithmetic, label_smoothing=smoothing
    )
    told: list[str] = []
    tasks = TasksExecutor(
        two,
        make_optimizer(two, Config(**options)),
        arithmetic,
        label_smoothing=smoothing,
        tell=told.append,
        grain=grain,
        portable=portable,
    )
    pool = grain.threads if grain is not None else 2
    return Twins(plain, tasks, pool, tolerance or TOLERANCE[precision], told)
