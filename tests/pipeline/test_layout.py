"""Networks as stages: which cuts are allowed, and which are chosen."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.models.zoo import build_model
from convoy.pipeline.costs import Costs
from convoy.pipeline.layout import (
    check_stages,
    choose_bounds,
    lay_out,
    most_stages,
    weight_layers,
    whole,
)
from convoy.pipeline.partition import Block, Worker, rescaled, slowest_stage
from convoy.pipeline.recipe import RECIPES


class Branches(nn.Module):
    """Two ways that come together: no sequence, so it is one block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.short = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.long(x) + self.short(x)
        return out


class Lump(nn.Module):
    """A network that is no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Backwards(nn.Sequential):
    """A sequence that runs in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(list(self)):
            x = block(x)
        return x


def _branched() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(Branches(4), nn.ReLU(), nn.MaxPool2d(2)),
        Branches(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10),
    )


# ---------------------------------------------------------------- layouts


def test_a_users_sequence_is_cut_between_blocks_never_inside_branches() -> None:
    model = _branched()
    assert weight_layers(model) == [1, 3, 3, 1]
    assert most_stages(model) == 4
    layout = lay_out(model, (0, 1, 2, 3, 4))
    assert layout.names == ("0", "1.0", "2", "5")
    assert layout.cuts == (1, 4, 7)
    assert layout.size == 4
    x = torch.randn(2, 3, 8, 8)
    y = x
    for stage in range(layout.size):
        for block in layout.blocks_of(stage):
            y = block(y)
    assert torch.equal(y, model(x))


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "vgg16-bn", "resnet20"])
def test_the_blocks_of_all_stages_are_the_network(name: str) -> None:
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    model = build_model(name, shape, 10, seed=0).eval()
    blocks = len(weight_layers(model))
    layout = lay_out(model, (0, 1, blocks // 2, blocks))
    x = torch.randn(2, *shape)
    y = x
    for stage in range(3):
        y = nn.Sequential(*layout.blocks_of(stage))(y)
    assert torch.equal(y, model(x))
    owned = [p for s in range(3) for block in layout.blocks_of(s) for p in block.parameters()]
    assert [id(p) for p in owned] == [id(p) for p in model.parameters()]


def test_the_papers_cuts_are_named_as_in_the_paper() -> None:
    model = build_model("resnet20", (3, 32, 32), 10, seed=0)
    bounds = choose_bounds(
        Config(strategy="pipeline", cuts=(7.0, 13.0)), _costs(model), [_worker(11)] * 3
    )
    layout = lay_out(model, bounds)
    assert layout.cuts == (7, 13)
    assert layout.leads(RECIPES["published"]) == [4, 2, 0]
    assert layout.leads(RECIPES["convoy"]) == [2, 1, 0]


def test_a_network_as_one_stage_has_no_cuts_and_no_lead() -> None:
    layout = lay_out(Lump(), (0, 1))
    assert layout.cuts == ()
    assert layout.leads(RECIPES["published"]) == [0]


def _sharing() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), shared, nn.ReLU(), shared, nn.Linear(3, 2))


def test_weights_that_two_stages_would_share_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out(_sharing(), (0, 2, 3, 4))
    assert str(caught.value) == (
        "two stages would share weights; got 'stages 1 and 2'. "
        "Cut elsewhere, or give the layers weights of their own."
    )


def test_weights_that_are_tied_between_layers_are_refused_as_well() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="stages 1 and 3"):
        lay_out(model, (0, 1, 2, 3))


@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 4), (0, 1, 3, 4), (0, 3, 4)])
def test_a_stage_may_use_its_own_weights_twice(bounds: tuple[int, ...]) -> None:
    assert lay_out(_sharing(), bounds).bounds == bounds


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("stages", [1, 2, 11])
def test_as_many_stages_as_there_are_blocks_are_allowed(stages: int) -> None:
    check_stages(Config(), build_model("resnet20", (3, 32, 32), 10, seed=0), stages)


def test_more_stages_than_blocks_are_refused_with_where_it_can_be_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        check_stages(Config(), build_model("resnet20", (3, 32, 32), 10, seed=0), 12)
    assert str(caught.value) == (
        "there are more stages than the network can be cut into; got 12; "
        "allowed: at most 11: it can be cut after 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 weight layers"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("cuts", "what"),
    [
        ((2.0,), "'cuts' lie where the network cannot be cut; got '2'"),
        ((1.0, 8.0), "'cuts' lie where the network cannot be cut; got '1, 8'"),
        ((4.0, 1.0), "'cuts' must rise; got '4, 1'"),
        ((4.0, 4.0), "'cuts' must rise; got '4, 4'"),
    ],
)
def test_cuts_inside_branches_or_in_disorder_are_refused_with_those_that_are_allowed(
    cuts: tuple[float, ...], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_stages(Config(strategy="pipeline", cuts=cuts), _branched(), len(cuts) + 1)
    assert str(caught.value) == f"{what}; allowed: 1, 4, 7"


def test_cuts_that_are_legal_are_accepted() -> None:
    check_stages(Config(strategy="pipeline", cuts=(1.0, 7.0)), _branched(), 3)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Lump(), "Lump"),
        (Backwards(nn.Linear(4, 4), nn.Linear(4, 4)), "Backwards"),
        (nn.Sequential(Lump()), "Sequential"),
    ],
)
def test_a_network_that_cannot_be_walked_is_one_stage_only(model: nn.Module, name: str) -> None:
    assert most_stages(model) == 1
    check_stages(Config(), model, 1)
    for config, stages in (
        (Config(), 2),
        (Config(strategy="pipeline", cuts=(1.0,)), 2),
        (Config(strategy="pipeline", cuts=(1.0,)), 1),
    ):
        with pytest.raises(ConfigError) as caught:
            check_stages(config, model, stages)
        assert str(caught.value) == (
            f"this network cannot be cut: it is no sequence of blocks; got '{name}'. "
            "Build it as an nn.Sequential of blocks; see docs/pipeline.md."
        )


# ---------------------------------------------------------------- what is chosen


def _worker(blocks: int) -> Worker:
    return Worker((1.0,) * blocks)


def _costs(model: nn.Module) -> Costs:
    layers = weight_layers(model)
    blocks = tuple(Block(str(number), count) for number, count in enumerate(layers))
    return Costs(blocks, (1.0,) * len(blocks))


def test_cuts_by_hand_hold_as_long_as_there_are_as_many_workers() -> None:
    model = _branched()
    config = Config(strategy="pipeline", cuts=(1.0, 7.0))
    assert choose_bounds(config, _costs(model), [_worker(4)] * 3) == (0, 1, 3, 4)
    # One is gone: what is left is cut by cost.
    assert choose_bounds(config, _costs(model), [_worker(4)] * 2) == (0, 2, 4)
    assert choose_bounds(config, _costs(model), [_worker(4)]) == (0, 4)


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [
        ([(1.0, 1.0, 1.0, 1.0)] * 2, (0, 2, 4)),
        ([(1.0, 1.0, 1.0, 1.0), (3.0, 3.0, 3.0, 3.0)], (0, 3, 4)),
        ([(3.0, 3.0, 3.0, 3.0), (1.0, 1.0, 1.0, 1.0)], (0, 1, 4)),
        ([(9.0, 1.0, 1.0, 1.0)] * 2, (0, 1, 4)),
        ([(1.0, 1.0, 1.0, 1.0)] * 4, (0, 1, 2, 3, 4)),
    ],
)
def test_without_cuts_the_slowest_stage_is_as_fast_as_it_can_be(
    seconds: list[tuple[float, ...]], bounds: tuple[int, ...]
) -> None:
    workers = [Worker(of_blocks) for of_blocks in seconds]
    assert choose_bounds(Config(), _costs(_branched()), workers) == bounds


def test_more_workers_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4: it can be cut after 1, 4, 7 weight layers"):
        choose_bounds(Config(), _costs(_branched()), [_worker(4)] * 5)


def test_cuts_are_whole_numbers() -> None:
    assert whole((7.0, 13.0)) == [7, 13]


# ---------------------------------------------------------------- what a segment has shown


def _times(workers: Sequence[Worker]) -> list[tuple[float, ...]]:
    return [worker.seconds for worker in workers]


def test_times_are_corrected_by_what_a_stage_really_took() -> None:
    workers = [Worker((1.0, 2.0, 3.0), 7), Worker((2.0, 2.0, 2.0), bytes_per_s=5.0)]
    found = rescaled(workers, (0, 2, 3), (6.0, 1.0))
    assert found == [
        Worker((2.0, 4.0, 6.0), 7),
        Worker((1.0, 1.0, 1.0), bytes_per_s=5.0),
    ]


def test_times_stay_where_nothing_was_measured() -> None:
    workers = [Worker((1.0, 2.0)), Worker((0.0, 0.0))]
    assert rescaled(workers, (0, 1, 2), (0.0, 5.0)) == workers


def test_corrected_times_tell_what_was_measured() -> None:
    workers = [Worker((1.0, 2.0, 3.0)), Worker((5.0, 7.0, 9.0))]
    bounds, busy = (0, 1, 3), (0.25, 8.0)
    found = rescaled(workers, bounds, busy)
    assert sum(found[0].seconds[:1]) == pytest.approx(0.25)
    assert sum(found[1].seconds[1:]) == pytest.approx(8.0)
    blocks = [Block(str(number), 1) for number in range(3)]
    assert slowest_stage(blocks, found, bounds) == pytest.approx(8.0)
    again = _times(rescaled(found, bounds, busy))
    assert again == [pytest.approx(row) for row in _times(found)]


def test_the_slowest_stage_counts_each_workers_own_blocks_and_its_link() -> None:
    workers = [Worker((1.0, 2.0, 4.0)), Worker((10.0, 20.0, 40.0))]
    blocks = [Block(str(number), 1, out_bytes=100) for number in range(3)]
    assert slowest_stage(blocks, workers, (0, 1, 3)) == 60.0
    assert slowest_stage(blocks, workers, (0, 2, 3)) == 40.0
    assert slowest_stage(blocks, workers[:1], (0, 3)) == 7.0
    slow = [Worker((1.0, 2.0, 4.0), bytes_per_s=1.0), workers[1]]
    assert slowest_stage(blocks, slow, (0, 2, 3)) == 100.0


def test_where_memory_is_short_everywhere_the_fastest_cut_is_taken() -> None:
    blocks = tuple(Block(str(number), 1, kept_bytes=10) for number in range(4))
    costs = Costs(blocks, (1.0,) * 4)
    short = [Worker((1.0,) * 4, memory_bytes=1)] * 2
    assert choose_bounds(Config(), costs, short) == (0, 2, 4)
    tight = [Worker((1.0,) * 4, memory_bytes=25), Worker((1.0,) * 4)]
    assert choose_bounds(Config(), costs, tight) == (0, 1, 4)
