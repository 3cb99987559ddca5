"""The configuration of a run: one frozen record that the file, the flags and Python all fill.

It is flat, so that `--lr 0.1`, `lr = 0.1` in TOML and `fit(lr=0.1)` are the same words.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from convoy.errors import ConfigError, did_you_mean
from convoy.options import coerce, option

SERVICE_STRATEGIES = ("server", "agwu", "sgwu")  # those with a parameter service
_NODES_AT_MOST = 64
_LARGEST_SUM = 1e12


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes and where it leaves its results."""

    data: str = option(
        "fashion-mini",
        "A data set by name, a folder, an archive, an .npz file, or MODULE:CALLABLE.",
        group="Data",
    )
    data_dir: str | None = option(
        None, "Where the files of a named data set lie.", group="Data", on_resume=True
    )
    cache_dir: str | None = option(
        None,
        "Where decoded images are kept (default: the user's cache folder).",
        group="Data",
        on_resume=True,
    )
    image_size: int = option(
        0,
        "Crop and scale every image to this many pixels a side (0: as they are).",
        group="Data",
        at_least=0,
        at_most=1024,
    )
    test_fraction: float = option(
        0.2,
        "Part kept for the test where the data has none of its own.",
        group="Data",
        above=0.0,
        at_most=0.9,
    )
    max_bad_samples: int = option(
        0, "How many unreadable images may be left out.", group="Data", at_least=0
    )
    augment: Literal["auto", "none", "crop", "flip", "crop+flip"] = option(
        "auto", "How training images are varied (auto: as usual for the data set).", group="Data"
    )
    crop_padding: int = option(
        0,
        "Pixels of shift a crop may give (0: an eighth of the side).",
        group="Data",
        at_least=0,
        at_most=64,
    )
    cutout: int = option(
        0,
        "Side of a square that is blanked in each training image (0: none).",
        group="Data",
        at_least=0,
        at_most=1024,
    )

    model: str = option(
        "lenet5", "A network by name, or MODULE:CALLABLE that returns an nn.Module.", group="Model"
    )
    executor: str = option(
        "auto",
        "How a node computes a step (auto: what a short probe finds fastest, on a long run).",
        group="Model",
    )
    groups: int = option(
        0,
        "Groups of samples that the executor 'tasks' cuts a batch into, and a node's share of it "
        "into fewer (0: by batch and cores).",
        group="Model",
        at_least=0,
        at_most=4096,
    )
    group_norms: Literal["batch", "group"] = option(
        "batch",
        "Batch-norm under 'tasks': statistics of the whole batch, or of each group of samples.",
        group="Model",
    )
    priority: Literal["rank", "level"] = option(
        "rank",
        "Which ready task goes first under 'tasks': by the work still behind it, or by depth.",
        group="Model",
    )

    strategy: str = option(
        "auto",
        "How nodes work together (auto: lockstep, or single on one node).",
        group="Nodes",
        on_resume=True,
    )
    nodes: int = option(
        0,
        "Nodes to start on this machine (auto: as many as it is fastest with; none: only lead).",
        group="Nodes",
        at_least=-1,
        at_most=_NODES_AT_MOST,
        words={"auto": 0, "none": -1},
        on_resume=True,
    )
    devices: str | None = option(
        None, "A device for each node: cuda:0,cpu,cpu.", group="Nodes", on_resume=True
    )
    speeds: tuple[float, ...] = option(
        (),
        "Emulate nodes of these speeds, as parts of a core: 0.8,0.6,0.4,0.2.",
        group="Nodes",
        on_resume=True,
    )
    links: tuple[float, ...] = option(
        (),
        "Emulate a network link of so many Mbit/s for each emulated node: 100,100.",
        group="Nodes",
        on_resume=True,
    )
    speed_changes: str | None = option(
        None,
        "Change emulated speeds in mid-run: 1:0.2@30 gives node 1 speed 0.2 after 30 s.",
        group="Nodes",
        on_resume=True,
    )
    allocation: Literal["speed", "uniform", "fixed"] = option(
        "speed", "Shares of a batch: by measured speed, all equal, or fixed.", group="Nodes"
    )
    shares: tuple[float, ...] = option(
        (), "The proportions of fixed shares, one for each node.", group="Nodes"
    )
    min_share: int = option(
        8,
        "The smallest share of a batch that a node is given, if any.",
        group="Nodes",
        at_least=1,
        at_most=4096,
    )
    min_nodes: int = option(
        1,
        "Wait while there are fewer nodes.",
        group="Nodes",
        at_least=1,
        at_most=64,
        on_resume=True,
    )
    wire: Literal["full", "bf16"] = option(
        "full", "How gradients travel: as they are, or rounded to bf16.", group="Nodes"
    )
    overlap: bool = option(
        True, "Send gradients while others are still computed.", group="Nodes", on_resume=True
    )
    rule: str = option(
        "beat",
        "How the service merges what nodes hand in: NAME, or NAME:option=value,...",
        group="Server",
    )
    exchange_every: int = option(
        0,
        "Local steps between two exchanges (auto: as the link suggests; pass: once a local epoch).",
        group="Server",
        at_least=-1,
        at_most=100_000,
        words={"auto": 0, "pass": -1},
    )
    local_batch: int = option(
        0,
        "Samples of a local step (0: a share of the batch by speed, or an equal one).",
        group="Server",
        at_least=0,
    )
    staleness_bound: int = option(
        -1,
        "No update is merged that missed more versions than this (none: no bound).",
        group="Server",
        at_least=-1,
        words={"none": -1},
    )
    first_version: int = option(
        1, "The number of the first weights.", group="Server", at_least=0, at_most=1
    )
    holdings: Literal["none", "cumulative", "per-batch", "nominal", "uniform"] = option(
        "none",
        "Samples that a node keeps: none (any sample, any epoch), or handed out once, by IDPA "
        "(cumulative or per-batch), by nominal speed alone, or uniformly.",
        group="Server",
    )
    idpa_batches: int = option(
        4, "Batches that IDPA hands the data set out in.", group="Server", at_least=1, at_most=1000
    )
    stream_data: bool = option(
        False,
        "Nodes get the samples they need from the lead instead of reading the data set.",
        group="Server",
        on_resume=True,
    )
    norms: Literal["average", "local"] = option(
        "average",
        "Batch-norm's running statistics: averaged by the service, or each node's own.",
        group="Server",
    )
    momentum_on_pull: Literal["keep", "reset"] = option(
        "keep", "A node's momentum when it takes new weights over.", group="Server"
    )
    durability: Literal["checkpoint", "journal"] = option(
        "checkpoint",
        "The service's state is on disk now and then, or before every answer.",
        group="Server",
        on_resume=True,
    )
    durable_updates: int = option(
        50,
        "Versions that may be lost with the service at most, with 'checkpoint'.",
        group="Server",
        at_least=1,
        on_resume=True,
    )
    servers: int = option(
        1,
        "Processes that share the parameter service.",
        group="Server",
        at_least=1,
        at_most=16,
        on_resume=True,
    )
    stages: int = option(
        0,
        "Stages that the network is cut into (auto: one for each node).",
        group="Pipeline",
        at_least=0,
        at_most=_NODES_AT_MOST,
        words={"auto": 0},
        on_resume=True,
    )
    cuts: tuple[float, ...] = option(
        (),
        "Cut after so many weight layers: 7,13 (default: where stages take equally long).",
        group="Pipeline",
        on_resume=True,
    )
    recipe: str = option(
        "convoy",
        "How a pipeline keeps its accuracy: NAME, or NAME:choice=value,...",
        group="Pipeline",
    )
    pipelined: str = option(
        "all",
        "How much of the run is pipelined: all, a part (0.5), so many steps (20000), or plateau: "
        "until the test accuracy no longer rises. The rest is plain.",
        group="Pipeline",
    )
    plain_first: bool = option(False, "Plain first, pipelined afterwards.", group="Pipeline")
    virtual: bool = option(
        False,
        "Compute a pipeline's numbers on one device, without the pipeline.",
        group="Pipeline",
        on_resume=True,
    )
    layers: Literal["auto", "columns"] = option(
        "auto",
        "How fully connected layers are cut over nodes: so that least travels, or all of them "
        "by output neurons, as published.",
        group="Hybrid",
        on_resume=True,
    )
    boundary: Literal["all", "turns", "slices"] = option(
        "all",
        "How samples cross to the fully connected layers: all at once, one node's after the "
        "other's, or a slice of every node's at a time.",
        group="Hybrid",
        on_resume=True,
    )
    mixing: bool = option(
        False,
        "Butterfly mixing: nodes take the mean of their weights with one partner at each step, "
        "instead of adding up all gradients (2, 4, 8, ... nodes).",
        group="Hybrid",
        on_resume=True,
    )
    restarts: int = option(
        3,
        "How often a node of this machine that died is started again.",
        group="Nodes",
        at_least=0,
        at_most=1000,
        on_resume=True,
    )
    node_timeout_s: float = option(
        3.0,
        "A node that gives no sign of life for so long is left behind.",
        group="Nodes",
        at_least=0.5,
        at_most=3600,
        on_resume=True,
    )
    quorum_timeout_s: float = option(
        300.0,
        "Give up after so long without enough nodes.",
        group="Nodes",
        at_least=1.0,
        at_most=86400,
        on_resume=True,
    )

    epochs: int = option(
        15, "Passes over the training data.", group="Training", at_least=1, on_resume=True
    )
    batch: int = option(64, "Samples per step.", group="Training", at_least=1)
    lr: float = option(0.05, "Highest learning rate.", group="Training", at_least=0.0)
    momentum: float = option(0.9, "SGD's momentum.", group="Training", at_least=0.0, at_most=0.9999)
    nesterov: bool = option(True, "Nesterov's form of momentum.", group="Training")
    weight_decay: float = option(5e-4, "L2 penalty.", group="Training", at_least=0.0)
    label_smoothing: float = option(
        0.0,
        "Part of the target spread over all classes.",
        group="Training",
        at_least=0,
        at_most=0.9,
    )
    schedule: Literal["cosine", "step", "constant"] = option(
        "cosine", "How the learning rate falls after the warm-up.", group="Training"
    )
    warmup_epochs: float = option(
        1.0, "Epochs over which the learning rate rises from zero.", group="Training", at_least=0.0
    )
    milestones: tuple[float, ...] = option(
        (), "Epochs at which 'step' cuts the rate (default: at 1/2 and 3/4).", group="Training"
    )
    gamma: float = option(
        0.1, "What 'step' multiplies the rate by.", group="Training", above=0.0, at_most=1.0
    )
    mirrored_test: bool = option(
        False, "Test each image together with its mirror image.", group="Training"
    )
    target_accuracy: float = option(
        0.0,
        "Stop as soon as the test accuracy reaches this (0: never).",
        group="Training",
        at_least=0.0,
        at_most=1.0,
        on_resume=True,
    )
    stop_after: int = option(
        0,
        "Save and leave after this many epochs of the whole; --resume goes on (0: never).",
        group="Training",
        at_least=0,
        on_resume=True,
        kept=False,
    )
    seed: int = option(
        0, "Decides weights, order, augmentation and dropout.", group="Training", at_least=0
    )

    device: str = option("auto", "auto, cpu, cuda or cuda:N.", group="Machine", on_resume=True)
    threads: int = option(
        0,
        "CPU threads for the arithmetic (0: one a core).",
        group="Machine",
        at_least=0,
        at_most=1024,
        on_resume=True,
    )
    precision: Literal["auto", "fp32", "bf16", "fp64"] = option(
        "auto", "Arithmetic; auto takes bf16 where a short probe shows a gain.", group="Machine"
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = option(
        "auto", "Layout of images in memory; auto probes.", group="Machine"
    )
    deterministic: bool = option(
        False, "Same bits each time on a GPU too, at some cost.", group="Machine"
    )

    out: str | None = option(
        None, "The run's folder (default: a new one under runs/).", group="Output", kept=False
    )
    checkpoint_steps: int = option(
        0,
        "Save every so many steps, beside the save after each epoch (0: epochs only).",
        group="Output",
        at_least=0,
        on_resume=True,
    )
    log_interval_s: float = option(
        1.0, "Seconds between two progress records.", group="Output", at_least=0.1, on_resume=True
    )

    def __post_init__(self) -> None:
        """Check every field's type and range, then the laws between fields."""
        for field in dataclasses.fields(self):
            value = coerced(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        _check_laws(self)

    def replaced(self, changes: Mapping[str, object]) -> "Config":
        """Return a copy with some fields changed, checked again."""
        check_names(changes)
        return dataclasses.replace(self, **cast(dict[str, Any], dict(changes)))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, in the order they are declared."""
        return dataclasses.asdict(self)


def stages_asked(config: Config) -> int:
    """Return how many stages a config wants, directly or by its cuts; 0 leaves it open."""
    return config.stages or (len(config.cuts) + 1 if config.cuts else 0)


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config)}
HINTS: dict[str, Any] = get_type_hints(Config)


def coerced(name: str, value: object) -> object:
    """Return a field's value in its declared type and range, or say what is wrong with it."""
    return coerce(name, value, HINTS[name], FIELDS[name].metadata)


def check_names(values: Mapping[str, object], source: str = "") -> None:
    """Refuse a name that is no option, with the closest one that is."""
    for name in values:
        if name not in FIELDS:
            where = f" in {source}" if source else ""
            raise ConfigError(
                f"unknown option '{name}'{where}",
                hint=did_you_mean(name, FIELDS) or f"Known: {', '.join(FIELDS)}.",
            )


def _check_laws(config: Config) -> None:
    """Check what must hold between fields."""
    _check_training(config)
    _check_nodes(config)
    _check_pipeline(config)
    _check_hybrid(config)


def _check_nodes(config: Config) -> None:
    counts = {
        "nodes": max(config.nodes, 0),
        "speeds": len(config.speeds),
        "links": len(config.links),
        "devices": len(config.devices.split(",")) if config.devices else 0,
        "shares": len(config.shares),
        "stages": 0 if config.virtual else stages_asked(config),
    }
    given = {name: count for name, count in counts.items() if count}
    if len(set(given.values())) > 1:
        told = ", ".join(f"{name}: {count}" for name, count in given.items())
        raise ConfigError("these options disagree on the number of nodes", got=told)
    if bool(config.shares) != (config.allocation == "fixed"):
        raise ConfigError(
            "'shares' and '--allocation fixed' belong together", got=config.allocation
        )
    if config.shares and not 0 < sum(config.shares) < _LARGEST_SUM:
        raise ConfigError("'shares' must not all be 0, nor beyond measure", got=config.shares)
    if any(speed <= 0 for speed in config.speeds) or len(config.speeds) > _NODES_AT_MOST:
        allowed = f"at most {_NODES_AT_MOST} numbers above 0"
        raise ConfigError("'speeds' are out of range", got=config.speeds, allowed=allowed)
    if config.links and not config.speeds:
        raise ConfigError("'links' needs emulated nodes", hint="Give --speeds.")
    if config.stream_data and config.strategy not in SERVICE_STRATEGIES:
        raise ConfigError(
            "'stream_data' needs a parameter service",
            got=config.strategy,
            allowed=", ".join(SERVICE_STRATEGIES),
        )
    if config.speed_changes and not config.speeds:
        raise ConfigError("'speed_changes' needs emulated nodes", hint="Give --speeds.")
    if config.strategy == "single" and max(given.values(), default=1) > 1:
        raise ConfigError(
            "the strategy 'single' has one node",
            got=max(given.values()),
            hint="Give --strategy lockstep.",
        )


def _check_pipeline(config: Config) -> None:
    if any(cut != int(cut) for cut in config.cuts):
        raise ConfigError("'cuts' must be whole numbers", got=config.cuts)
    if config.stages and config.cuts and config.stages != len(config.cuts) + 1:
        raise ConfigError(
            "'stages' and 'cuts' disagree",
            got=f"{config.stages} stages and {len(config.cuts)} cuts",
            allowed="one stage more than cuts",
        )
    if config.virtual and (config.speeds or config.devices or config.nodes > 1):
        raise ConfigError("'virtual' computes on one device", hint="Leave out nodes and speeds.")
    asked = {"stages": config.stages, "cuts": config.cuts, "virtual": config.virtual}
    for name, value in asked.items():
        if value and config.strategy != "pipeline":
            raise ConfigError(f"'{name}' needs a pipeline", hint="Give --strategy pipeline.")


def _check_hybrid(config: Config) -> None:
    asked = {
        "layers": config.layers != "auto",
        "boundary": config.boundary != "all",
        "mixing": config.mixing,
    }
    for name, is_given in asked.items():
        if is_given and config.strategy != "hybrid":
            raise ConfigError(f"'{name}' needs a hybrid run", hint="Give --strategy hybrid.")
    if config.strategy == "hybrid" and config.executor not in ("auto", "eager"):
        raise ConfigError(
            "a hybrid run is computed eagerly", got=config.executor, allowed="auto, eager"
        )
    nodes = max(config.nodes, len(config.speeds))
    if config.mixing and nodes > 0 and nodes & (nodes - 1):
        raise ConfigError(
            "butterfly mixing needs a partner for everyone", got=nodes, allowed="2, 4, 8, ... nodes"
        )


def _check_training(config: Config) -> None:
    if config.nesterov and config.momentum == 0:
        raise ConfigError(
            "'nesterov' needs momentum", got=0.0, hint="Give --no-nesterov, or a momentum above 0."
        )
    if config.warmup_epochs > config.epochs:
        raise ConfigError(
            "'warmup_epochs' is longer than the run",
            got=config.warmup_epochs,
            allowed=f"at most epochs = {config.epochs}",
        )
    if config.milestones and config.schedule != "step":
        raise ConfigError(
            "'milestones' belong to the step schedule",
            got=config.schedule,
            hint="Give --schedule step.",
        )
    if list(config.milestones) != sorted(set(config.milestones)):
        raise ConfigError("'milestones' must rise", got=config.milestones)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a run file; its keys are checked, its values not yet."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("the run file does not exist", got=str(path)) from None
    except IsADirectoryError:
        raise ConfigError(
            "the run file is a folder",
            got=str(path),
            hint="To go on with a run, give --resume FOLDER.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the run file cannot be read: {error}", got=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    check_names(values, str(path))
    return values


def load_config(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """Build a config: defaults, under the run file, under what was given by hand."""
    values = read_toml(path) if path is not None else {}
    return Config(**{**values, **cast(dict[str, Any], dict(overrides))})


def changed_on_resume(saved: Config, overrides: Mapping[str, object]) -> Config:
    """Return a saved run's config with overrides, refusing those that would falsify the run."""
    check_names(overrides)
    for name, value in overrides.items():
        same = coerced(name, value) == getattr(saved, name)
        if not same and not FIELDS[name].metadata["on_resume"]:
            allowed = ", ".join(n for n, f in FIELDS.items() if f.metadata["on_resume"])
            raise ConfigError(
                f"a resumed run cannot change '{name}'",
                got=value,
                allowed=allowed,
                hint="Start a new run instead.",
            )
    return saved.replaced(overrides)
