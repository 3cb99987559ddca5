"""Stages for tests: computed by PyTorch, or as tasks."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.passes import TaskPasses
from convoy.inner.tasks.step import Grain
from convoy.pipeline.passes import EagerPasses
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.stage import Stage


def eager_stage(
    blocks: Sequence[nn.Module],
    lead: int,
    recipe: Recipe,
    config: Config,
    arithmetic: Arithmetic,
    momentum: Mapping[nn.Parameter, Tensor] | None = None,
    *,
    is_first: bool,
    postpones: bool = False,
) -> Stage:
    """Return a stage of these blocks."""
    part = nn.Sequential(*blocks)
    passes = EagerPasses(part, arithmetic, is_first=is_first, postpones=postpones)
    return Stage(blocks, lead, recipe, config, arithmetic, momentum or {}, passes)


def task_stages(
    parts: Sequence[Sequence[nn.Module]],
    leads: Sequence[int],
    recipe: Recipe,
    config: Config,
    arithmetic: Arithmetic,
    told: list[str],
) -> list[Stage]:
    """Return stages that are computed as tasks; what cannot be is told."""
    stages: list[Stage] = []
    for blocks, lead in zip(parts, leads, strict=True):
        part, is_first = nn.Sequential(*blocks), not stages
        eager = EagerPasses(part, arithmetic, is_first=is_first, postpones=False)
        grain = Grain(3, 1)
        passes = TaskPasses(
            part, arithmetic, eager, wants_error=not is_first, grain=grain, tell=told.append
        )
        stages.append(Stage(blocks, lead, recipe, config, arithmetic, {}, passes))
    return stages
