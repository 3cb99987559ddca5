"""Who takes part on this machine: as asked for, or as many nodes as it is fastest with.

PyTorch's own threads waste much of a machine on small networks, so that several nodes of few
threads can be faster than one of many; but they must be started and exchange gradients.
"""

import math
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.assembly import Given
from convoy.config import Config, stages_asked
from convoy.errors import ConfigError, EnvironmentProblem
from convoy.hybrid.head import check_layers, find_parts
from convoy.hybrid.layout import Setting
from convoy.inner.arithmetic import choose_device
from convoy.inner.probe import measure
from convoy.launch.lab import check_speeds, parse_speed_changes
from convoy.launch.links import Links, check_rates
from convoy.machine import usable_cores
from convoy.outer.crew import Crew, Serving
from convoy.outer.job import Job
from convoy.outer.service_plan import check_service
from convoy.outer.strategy import AUTO
from convoy.pipeline.forms import forms_of
from convoy.pipeline.layout import check_stages, most_stages
from convoy.pipeline.recipe import parse_recipe

NO_NODES = -1
_START_S = 6.0  # what it takes to start nodes: a run must be longer to gain by them
_SHARING = 0.85  # of the sum of their speeds is left when nodes work side by side
_WORTH_IT = 1.15  # what several nodes must promise, for the promise comes from a short probe
_NODES_AT_MOST = 4  # that share a network, unless more are asked for: each costs traffic
_SHORT_RUN_S = 20.0  # nothing is measured for a run that one node finishes so soon


@dataclass(frozen=True, slots=True)
class Layout:
    """So many nodes of so many threads, and the samples per second they promise."""

    nodes: int
    threads: int
    samples_per_s: float


def check_crew(config: Config, *, serving: bool) -> None:
    """Refuse a crew that could never train, before any work is done."""
    nodes = planned_nodes(config)
    if nodes == NO_NODES and not serving:
        raise ConfigError("somebody must train", got="none", hint="Or is it `convoy lead`?")
    if 0 < nodes < config.min_nodes and not serving:
        raise ConfigError(
            "'min_nodes' is more than there will be",
            got=config.min_nodes,
            allowed=f"at most {nodes}",
        )
    for name in device_names(config):
        choose_device(name)
    check_service(config, max(1, nodes))
    _check_computation(config)
    if config.speeds:
        check_speeds(config.speeds)
    if config.links:
        check_rates(config.links)
        missing = Links.available()
        if missing is not None:
            raise EnvironmentProblem("links cannot be emulated here", hint=missing)
    for change in parse_speed_changes(config.speed_changes) if config.speed_changes else ():
        if change.node >= len(config.speeds):
            raise ConfigError(
                "'speed_changes' names a node that is not there",
                got=change.node + 1,
                allowed=f"1 to {len(config.speeds)}",
            )


def planned_nodes(config: Config) -> int:
    """Return how many nodes were asked for; 0 leaves it open, -1 wants none here."""
    if config.virtual:
        return 1
    return config.nodes or len(config.speeds) or len(device_names(config)) or stages_asked(config)


def device_names(config: Config) -> tuple[str, ...]:
    """Return the devices that were asked for, one for each node."""
    return tuple(name.strip() for name in config.devices.split(",")) if config.devices else ()


def threads_per_node(config: Config, nodes: int) -> int:
    """Return how many CPU threads each of some nodes gets."""
    if config.threads:
        return config.threads
    if config.speeds:
        return math.ceil(max(config.speeds))
    return max(1, usable_cores() // max(nodes, 1))


def config_of_nodes(config: Config) -> Config:
    """Return a config as the nodes of this machine see it."""
    nodes = planned_nodes(config)
    changes: dict[str, object] = {}
    if nodes > 1 or config.speeds:
        changes["threads"] = threads_per_node(config, nodes)
    if config.speeds and config.device == "auto" and not config.devices:
        changes["device"] = "cpu"  # emulated speeds are parts of a core
    if not _goes_back_by_own_weights(config):
        if config.precision == "auto":
            changes["precision"] = "fp32"
        if config.executor == AUTO and not config.virtual:
            changes["executor"] = "eager"
    if config.strategy == "hybrid":
        changes["executor"] = "eager"  # others could not follow weights that are cut
    return config.replaced(changes)


def config_of_others(config: Config, requested: Config) -> Config:
    """Return a run's config as nodes see it that are not like the lead: they choose for themselves.

    Args:
        config: of the run, with what the lead has chosen.
        requested: what was asked for.
    """
    asked = config_of_nodes(requested)  # which closes what would compute wrongly
    return config.replaced({"precision": asked.precision, "memory_format": asked.memory_format})


def _check_computation(config: Config) -> None:
    """Refuse what stages cannot compute."""
    if config.strategy != "pipeline":
        return
    own = _goes_back_by_own_weights(config)
    if config.precision == "bf16" and not own:
        raise ConfigError(
            "bf16 keeps a rounded copy of the weights that a forward pass read",
            got=config.recipe,
            hint="Give a recipe with backward=stashed, or --precision fp32.",
        )
    if config.virtual:  # which one trains the plain part of a hybrid run
        return
    if config.executor not in (AUTO, "eager", "tasks"):
        raise ConfigError(
            "this executor cannot compute a stage",
            got=config.executor,
            allowed="auto, eager, tasks",
        )
    if config.executor == "tasks" and not own:
        raise ConfigError(
            "tasks go back by the weights that they went forward with",
            got=config.recipe,
            hint="Give a recipe with backward=stashed, or --executor eager.",
        )


def _goes_back_by_own_weights(config: Config) -> bool:
    """Tell whether a backward pass reads what its forward pass read, rounded or recorded."""
    return config.strategy != "pipeline" or parse_recipe(config.recipe).needs_own_weights


def choose_crew(
    job: Job, given: Given, requested: Config, ledger: Path, serving: Serving | None
) -> Crew:
    """Decide who takes part; `job.config` says it afterwards too."""
    nodes = planned_nodes(requested)
    if requested.strategy == "pipeline":
        nodes = nodes or min(_workers_here(job), most_stages(job.model))
        check_stages(requested, job.model, stages_asked(requested) or nodes)
        forms_of(job.model, job.data.train.shape_CHW, job.executor.arithmetic)  # it may refuse
    if requested.strategy == "hybrid":
        nodes = nodes or _workers_here(job)
        setting = Setting(max(nodes, 1), requested.batch)
        check_layers(find_parts(job.model), requested.layers, setting)
    nodes = nodes or _nodes_by_probe(job, requested, serving)
    here = max(nodes, 0)
    devices = _devices(job, requested, here)
    strategy = requested.strategy
    if strategy == AUTO:
        strategy = "lockstep" if nodes > 1 or serving is not None else "single"
    job.config = job.config.replaced({"strategy": strategy, "nodes": nodes})
    return Crew(
        devices=devices,
        threads=threads_per_node(requested, nodes),
        ledger=ledger,
        serving=serving or Serving(token=secrets.token_hex(32)),
        requested=requested,
        model=given.model,
        data=given.data,
        expect=max(here, requested.min_nodes, serving.expect if serving else 0),
    )


def _devices(job: Job, requested: Config, nodes: int) -> tuple[str, ...]:
    if requested.devices:
        return device_names(requested)
    if job.train.device.type == "cuda" and requested.device == "auto":
        count = torch.cuda.device_count()
        return tuple(f"cuda:{slot % count}" for slot in range(nodes))
    return (job.config.device,) * nodes


def _workers_here(job: Job) -> int:
    """Return how many nodes this machine has processors for, within reason."""
    on_gpu = job.train.device.type == "cuda"
    workers = torch.cuda.device_count() if on_gpu else usable_cores()
    return min(workers, _NODES_AT_MOST)


def _nodes_by_probe(job: Job, requested: Config, serving: Serving | None) -> int:
    if requested.strategy == "single":
        return 1
    if job.train.device.type == "cuda":
        return max(1, torch.cuda.device_count()) if requested.device == "auto" else 1
    cores = usable_cores()
    left = (job.config.epochs - job.progress.epoch) * len(job.train)
    threads = min(requested.threads or cores, cores)
    if cores == 1 or (serving is None and left / _rate(job, threads, 1) < _SHORT_RUN_S):
        return 1
    return choose_layout(_layouts(job, cores, requested.threads), left).nodes


def choose_layout(layouts: list[Layout], samples: int) -> Layout:
    """Return the layout that is done first; several nodes must clearly gain.

    >>> one, two = Layout(1, 2, 100.0), Layout(2, 1, 150.0)
    >>> choose_layout([one, two], 100_000).nodes, choose_layout([one, two], 1_000).nodes
    (2, 1)
    """
    one = next(layout for layout in layouts if layout.nodes == 1)
    best = min(layouts, key=lambda layout: _seconds(layout, samples))
    return best if _seconds(one, samples) > _seconds(best, samples) * _WORTH_IT else one


def _seconds(layout: Layout, samples: int) -> float:
    start_s = _START_S if layout.nodes > 1 else 0.0
    return start_s + samples / layout.samples_per_s


def _layouts(job: Job, cores: int, threads: int) -> list[Layout]:
    """Measure one node and several; `threads` of each may be given."""
    counts = {1, cores // threads} if threads else {1, cores, cores // 2, cores // 4}
    layouts = []
    for nodes in sorted(counts - {0}):
        if nodes == 1 or job.config.batch // nodes >= job.config.min_share:
            each = threads or cores // nodes
            rate = _rate(job, each, nodes) * (nodes * _SHARING if nodes > 1 else 1)
            layouts.append(Layout(nodes, each, rate))
    return layouts


def _rate(job: Job, threads: int, nodes: int) -> float:
    """Measure the samples per second of one node with its part of a batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = max(1, job.config.batch // nodes)
        shape = job.data.train.shape_CHW
        budget_s = 0.05 if nodes == 1 else 0.3
        return measure(job.config, job.executor.arithmetic, job.model, shape, size, budget_s)
    finally:
        torch.set_num_threads(before)
