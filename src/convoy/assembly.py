"""Put a job together: data, network, arithmetic and executor, as a config describes them."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from convoy.config import Config
from convoy.data.augment import choose_augmentation
from convoy.data.batches import Batches
from convoy.data.images import ImageSet, TrainTest
from convoy.data.load import load_data
from convoy.errors import ConfigError
from convoy.inner.arithmetic import Arithmetic, choose_device, prepare_device
from convoy.inner.executor import AUTO as AUTO_EXECUTOR
from convoy.inner.executor import EXECUTORS, make_executor
from convoy.inner.schedule import make_schedule
from convoy.inner.way import Way, choose_way
from convoy.models.zoo import adopt_model, build_model, check_model_name
from convoy.monitor.events import EventStream, WarningEvent
from convoy.outer.job import Job
from convoy.outer.stop import Stop
from convoy.outer.strategy import AUTO, STRATEGIES
from convoy.tracking import Track

IN_MEMORY = "(in memory)"  # what a config calls a model or data set handed over in Python
_RESUME_IN_PYTHON = "Go on with convoy.fit(model, train, test, resume=FOLDER)."


@dataclass(frozen=True, eq=False)
class Given:
    """What the caller brings as objects instead of naming it in the config."""

    model: nn.Module | None = None
    data: TrainTest | None = None


def check_choices(config: Config, given: Given) -> None:
    """Refuse names and devices that do not exist here, before any work is done."""
    if config.strategy != AUTO:
        STRATEGIES.check(config.strategy)
    if config.executor != AUTO_EXECUTOR:
        EXECUTORS.check(config.executor)
    choose_device(config.device)
    if given.model is None:
        if config.model.startswith(IN_MEMORY):
            raise ConfigError("this run's model was handed over in Python", hint=_RESUME_IN_PYTHON)
        check_model_name(config.model)
    if given.data is None and config.data.startswith(IN_MEMORY):
        raise ConfigError("this run's data was handed over in Python", hint=_RESUME_IN_PYTHON)


def make_job(
    config: Config,
    given: Given,
    checkpoints: Path,
    events: EventStream,
    stop: Stop,
    track: Track,
) -> Job:
    """Load the data, build the network, choose the arithmetic; nothing is trained yet."""
    device = choose_device(config.device)
    prepare_device(device, threads=config.threads, deterministic=config.deterministic)
    data = given.data or load_data(config, track)
    if config.batch > len(data.train):
        raise ConfigError(
            "'batch' is larger than the training data",
            got=config.batch,
            allowed=f"at most {len(data.train)}",
        )
    shape = data.train.shape_CHW
    augmentation = choose_augmentation(config, data.augment, shape)
    model = _make_model(config, data, given.model)
    way = choose_way(config, device, model, shape, config.epochs * len(data.train))
    config, arithmetic = _effective(config, way), way.arithmetic
    if way.threads:
        torch.set_num_threads(way.threads)
    arithmetic.place(model)
    return Job(
        config=config,
        data=data,
        executor=make_executor(config, model, arithmetic, lambda why: _warn(events, why)),
        train=_make_batches(data.train, data, arithmetic),
        test=_make_batches(data.test, data, arithmetic),
        augmentation=augmentation,
        schedule=make_schedule(config, math.ceil(len(data.train) / config.batch)),
        events=events,
        stop=stop,
        checkpoints=checkpoints,
        identity={"model": config.model, "data": data.digest, "seed": config.seed},
    )


def _warn(events: EventStream, why: str) -> None:
    events.emit(WarningEvent(reason=why))


def _make_model(config: Config, data: TrainTest, given: nn.Module | None) -> nn.Module:
    in_shape, num_classes = data.train.shape_CHW, len(data.train.classes)
    if given is not None:
        return adopt_model(given, in_shape, num_classes, config.model)
    return build_model(config.model, in_shape, num_classes, config.seed)


def _make_batches(part: ImageSet, data: TrainTest, arithmetic: Arithmetic) -> Batches:
    return Batches(
        part,
        mean=data.mean,
        std=data.std,
        device=arithmetic.device,
        dtype=arithmetic.dtype,
        memory_format=arithmetic.memory_format,
    )


def _effective(config: Config, way: Way) -> Config:
    """Return the config with what was chosen automatically, so that a resume chooses the same."""
    return config.replaced(
        {
            "device": str(way.arithmetic.device),
            "precision": way.arithmetic.precision,
            "memory_format": way.arithmetic.layout,
            "executor": way.executor,
            "groups": way.groups,
            "threads": way.threads or config.threads,
        }
    )
