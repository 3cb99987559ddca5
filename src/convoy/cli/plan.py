"""`convoy plan`: how a pipeline or a hybrid run would go, before it does."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from convoy.cli.options import Options, given_values, whole_number
from convoy.cli.past import check_file
from convoy.config import Config, load_config
from convoy.errors import ConfigError
from convoy.machine import check_can_plot
from convoy.pipeline.recipe import parse_recipe
from convoy.pipeline.segments import parse_switch

if TYPE_CHECKING:
    from convoy.outer.job import Job
    from convoy.pipeline.forecast import Situation

_FORMATS = (".svg", ".png")
_STAGES = 2  # where nothing says how many
_MOST_BATCHES = 1000
# What decides a plan; a run file may hold more, which is passed over.
_FIELDS = (
    *("data", "data_dir", "cache_dir", "image_size", "test_fraction", "max_bad_samples"),
    *("model", "strategy", "nodes", "speeds", "links"),
    *("stages", "cuts", "recipe", "pipelined", "plain_first", "layers"),
    *("epochs", "batch", "seed"),
    *("device", "threads", "precision", "memory_format", "deterministic"),
)


def _make_options() -> type:
    """Return the options of a run that decide a plan."""
    fields = [(f.name, f.type, None) for f in dataclasses.fields(Options) if f.name in _FIELDS]
    made = dataclasses.make_dataclass("PlanOptions", fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts looks annotations up there
    return Parameter(name="*")(made)


PlanOptions = _make_options()


def plan(
    run_file: Path | None = None,
    /,
    *,
    options: PlanOptions | None = None,  # type: ignore[valid-type]
    batches: Annotated[int, Parameter(group="Output", converter=whole_number)] = 8,
    paper: Annotated[bool, Parameter(group="Output", negative="")] = False,
    out: Annotated[Path | None, Parameter(group="Output")] = None,
    json: Annotated[bool, Parameter(group="Output", negative="")] = False,
) -> None:
    """Show how a pipeline would run: its stages, its speed, and who waits for whom.

    With --strategy hybrid: which fully connected layers would be cut, and what would travel.
    Each block of a pipeline is measured once, here; nothing is trained or saved. Values are
    taken from RUN-FILE (TOML), over it from CONVOY_* variables, over those from the flags.

    Parameters
    ----------
    run_file:
        A TOML file with a run's options; those that do not matter for a plan are passed over.
    batches:
        How many batches are drawn.
    paper:
        Draw the cycles of the paper on stale weights: 2K+1 workers, and the versions they read.
    out:
        A file to draw the timeline into, .svg or .png.
    json:
        Print one JSON object with all figures as the last line on standard output.
    """
    if not 1 <= batches <= _MOST_BATCHES:
        allowed = f"1 to {_MOST_BATCHES}"
        raise ConfigError("'batches' is out of range", got=batches, allowed=allowed)
    picture = _check_picture(out) if out is not None else None
    config = load_config(run_file, given_values(options))
    if config.strategy == "hybrid":
        _plan_hybrid(config, json=json)
        return
    if config.strategy != "pipeline":
        raise ConfigError(
            "only pipelines and hybrid runs can be planned yet",
            got=config.strategy,
            allowed="pipeline, hybrid",
            hint="Give --strategy pipeline.",
        )
    _check_switch(config)
    config, situation = _survey(config, quiet=json)
    _tell(config, situation, batches, paper=paper, picture=picture, json=json)


def _plan_hybrid(config: Config, *, json: bool) -> None:
    from convoy.cli.traffic import as_record, print_traffic

    nodes = len(config.speeds) or max(config.nodes, 0) or _STAGES
    model = _make_job(_config_of_a_worker(config, nodes), quiet=json).model
    record = as_record(config, model, nodes)
    if json:
        print(json_format.dumps(record))
    else:
        print_traffic(record)


def _check_picture(path: Path) -> Path:
    if path.suffix not in _FORMATS:
        allowed = ", ".join(_FORMATS)
        raise ConfigError("a plan's picture has no such format", got=str(path), allowed=allowed)
    if path.suffix == ".png":
        check_can_plot()
    return check_file(path, "picture")


def _check_switch(config: Config) -> None:
    """Refuse what cannot be understood before torch is waited for."""
    parse_recipe(config.recipe)
    parse_switch(config.pipelined, 1, plain_first=config.plain_first)


def _survey(config: Config, *, quiet: bool) -> "tuple[Config, Situation]":
    """Build the network and measure its blocks; return how that was done, too."""
    # Torch takes two seconds to import: only once the options are known to be right.
    import torch

    from convoy.pipeline.costs import measure_blocks
    from convoy.pipeline.forecast import Situation, make_workers
    from convoy.pipeline.forms import forms_of
    from convoy.pipeline.layout import check_stages
    from convoy.pipeline.staleness import layer_weights

    stages = _count_stages(config)
    job = _make_job(_config_of_a_worker(config, stages), quiet=quiet)
    check_stages(config, job.model, stages)
    shape = job.data.train.shape_CHW
    forms_of(job.model, shape, job.executor.arithmetic)  # refuses what cannot be a stage
    costs = measure_blocks(job.model, shape, config.batch, job.executor.arithmetic)
    speeds = config.speeds or (1.0,) * stages
    situation = Situation(
        blocks=costs.blocks,
        weights=tuple(layer_weights(job.model)),
        workers=make_workers(costs.seconds, speeds, config.links),
        recipe=parse_recipe(config.recipe),
        batch=config.batch,
        steps=job.schedule.steps_per_epoch,
        precision=job.executor.arithmetic.precision,
    )
    chosen = {name: getattr(job.config, name) for name in ("device", "precision")}
    return config.replaced({**chosen, "threads": torch.get_num_threads()}), situation


def _make_job(config: Config, *, quiet: bool) -> "Job":
    """Build a network, with all that training it would need."""
    from convoy.assembly import Given, check_choices, make_job
    from convoy.monitor.events import EventStream
    from convoy.monitor.terminal import make_console, make_track
    from convoy.outer.stop import NeverStop

    check_choices(config, Given())
    track = make_track(make_console(quiet=quiet))
    return make_job(config, Given(), Path(), EventStream([]), NeverStop(), track)


def _count_stages(config: Config) -> int:
    """Return how many stages were asked for; where several options say it, they agree."""
    return (
        config.stages
        or (len(config.cuts) + 1 if config.cuts else 0)
        or len(config.speeds)
        or max(config.nodes, 0)
        or _STAGES
    )


def _config_of_a_worker(config: Config, stages: int) -> Config:
    """Return the config of one of several workers, as if it were alone."""
    from convoy.launch.choose import config_of_nodes
    from convoy.launch.links import check_rates

    if config.links:
        check_rates(config.links)
    if stages > 1 and not config.threads:
        config = config.replaced({"threads": 1})  # each stage has a core of its own
    nobody: dict[str, Any] = {"strategy": "auto", "stages": 0, "cuts": (), "virtual": False}
    nobody |= {"layers": "auto", "boundary": "all", "mixing": False}
    return config_of_nodes(config).replaced({**nobody, "executor": "eager"})


def _tell(
    config: Config,
    situation: "Situation",
    batches: int,
    *,
    paper: bool,
    picture: Path | None,
    json: bool,
) -> None:
    from convoy.cli.forecast import as_record, print_forecast
    from convoy.pipeline.drawing import write_picture
    from convoy.pipeline.forecast import as_run, make_forecast
    from convoy.pipeline.layout import whole
    from convoy.pipeline.staleness import stale_part
    from convoy.pipeline.timeline import simulate

    bounds = situation.cut(whole(config.cuts))
    forecast = make_forecast(situation, bounds, stale_part(situation.weights, bounds))
    order = situation.recipe.order
    timeline = simulate(as_run(situation.pace(bounds), order), order, batches)
    if picture is not None:
        write_picture(timeline, picture, f"{config.model}, batch {config.batch}")
    if json:
        print(json_format.dumps(as_record(config, situation, forecast, timeline, picture)))
    else:
        print_forecast(config, situation, forecast, timeline, paper=paper, picture=picture)
