"""Find out by a short measurement how a node computes a step fastest, and remember it.

First the plain executor with every precision and layout that the config leaves open; then, on a
run that is long enough to pay for it, the executor that suits the device: `tasks` on a CPU, cut
up in several ways, `graph` on a GPU, and `fused` where the run is so long that compiling pays.
Another one must be faster than the plain one by 3 %, which is what two measurements of the same
thing differ by.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, optim

from convoy.config import Config
from convoy.files import default_cache_dir, digest_of_text, write_atomically
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import AUTO
from convoy.inner.probe import (
    candidate_arithmetics,
    choose_arithmetic,
    measure,
    measure_executor,
)
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.tasks.step import Grain
from convoy.machine import processor_name, versions

_LONG_RUN_S = {"cpu": 120.0, "cuda": 10.0}  # a shorter one is over before the probe has paid
_LONG_ALONE_S = 600.0  # on one thread, which the first time compiles the engine by itself
_COMPILING_PAYS_S = 300.0  # it takes half a minute, and wins a fifth to a third
_GROUP_SIZES = (4, 8, 16, 32)  # samples; what suits a cache depends on the network
_MIN_GAIN = 1.03
_LARGEST_PROBE = 512  # samples of a step that is only measured


@dataclass(frozen=True, slots=True)
class Way:
    """How a node computes steps.

    Attributes:
        executor: by its name.
        arithmetic: device, precision and layout.
        groups: of samples, for `tasks`; 0: the executor decides.
        threads: on a CPU; 0: as many as there are.
        samples_per_s: that it was measured at; 0: it was not measured.
    """

    executor: str
    arithmetic: Arithmetic
    groups: int = 0
    threads: int = 0
    samples_per_s: float = 0.0


def choose_way(
    config: Config,
    device: torch.device,
    model: nn.Module,
    in_shape: tuple[int, int, int],
    samples: int,
    *,
    remembered: bool = True,
) -> Way:
    """Return the fastest way among those that a config leaves open.

    Args:
        config: what was asked for.
        device: where to compute.
        model: what to train; it is not changed.
        in_shape: channels, height and width of an image.
        samples: that the whole run will train.
        remembered: what was found before will do.
    """
    if config.executor == AUTO and _is_staged(config) and device.type != "cpu":
        config = config.replaced({"executor": "eager"})  # a stage's passes are no single launch
    if config.executor != AUTO and (config.executor != "tasks" or config.groups):
        arithmetic, _ = choose_arithmetic(config, device, model, in_shape)
        return Way(config.executor, arithmetic, config.groups)
    memory = _Memory(config, device, model, in_shape)
    known = memory.recall() if remembered else None
    if known is not None:
        return known
    way = _Probe(config, device, model, in_shape).find(samples)
    if way.samples_per_s:  # else nothing was tried that would be worth remembering
        memory.keep(way)
    return way


class _Probe:
    """Measures ways to compute a step of one network on one device."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        model: nn.Module,
        in_shape: tuple[int, int, int],
    ) -> None:
        self._config, self._device = config, device
        self._model, self._in_shape = model, in_shape
        self._size = min(config.batch, _LARGEST_PROBE)
        self._forced = config.executor != AUTO  # only how it is cut is to be found

    def find(self, samples: int) -> Way:
        """Return the fastest way for a run of some samples."""
        config, on_cpu = self._config, self._device.type == "cpu"
        plain = config.replaced({"executor": "eager"})
        arithmetic, _ = choose_arithmetic(plain, self._device, self._model, self._in_shape)
        alone = on_cpu and torch.get_num_threads() == 1
        if not self._forced and alone and not self._has_own_convolutions():
            return Way("eager", arithmetic)  # there is nothing to spread tasks over
        best = self._measured("eager", arithmetic)
        long_s = _LONG_ALONE_S if alone else _LONG_RUN_S[self._device.type]
        if not self._forced and samples / best.samples_per_s < long_s:
            return Way("eager", arithmetic)
        best = self._better(best, self._other_layouts(arithmetic))
        if self._forced:
            best = Way(config.executor, best.arithmetic)  # which tells why, if it cannot be
        best = self._better(best, self._tasks() if on_cpu else self._graphs())
        if not on_cpu and samples / best.samples_per_s > _COMPILING_PAYS_S:
            best = self._better(best, iter([self._measured("fused", best.arithmetic)]))
        if best.executor == "eager" and on_cpu and not alone and not config.threads:
            best = self._with_fewer_threads(best)
        return best

    def _has_own_convolutions(self) -> bool:
        """Tell whether tasks may be faster by their convolutions alone."""
        candidates = candidate_arithmetics(self._config, self._device)
        suit = any(a.layout == "channels_last" and a.precision != "fp64" for a in candidates)
        return suit and has_own_convolutions()

    @staticmethod
    def _better(best: Way, others: Iterator[Way]) -> Way:
        """Return the best of some ways; another executor must be clearly faster."""
        for way in others:
            of_one_kind = best.executor == way.executor != "eager"
            if way.samples_per_s > best.samples_per_s * (1.0 if of_one_kind else _MIN_GAIN):
                best = way
        return best

    def _measured(self, executor: str, arithmetic: Arithmetic) -> Way:
        config = self._config.replaced({"executor": executor})
        speed = measure(config, arithmetic, self._model, self._in_shape, self._size)
        return Way(executor, arithmetic, samples_per_s=speed)

    def _other_layouts(self, arithmetic: Arithmetic) -> Iterator[Way]:
        """Yield the plain executor with other layouts, at the size of a whole batch."""
        for other in candidate_arithmetics(self._config, self._device):
            if other.precision == arithmetic.precision and other != arithmetic:
                yield self._measured("eager", other)

    def _graphs(self) -> Iterator[Way]:
        for arithmetic in candidate_arithmetics(self._config, self._device):
            yield self._measured("graph", arithmetic)

    def _tasks(self) -> Iterator[Way]:
        """Yield what each cut gives; a network is recorded once for each arithmetic."""
        config = self._config
        candidates = candidate_arithmetics(config, self._device)
        # Groups of samples are small, and small batches are faster with channels last.
        better = [a for a in candidates if a.layout == "channels_last"] or candidates
        everything = torch.get_num_threads()
        counts = {everything} if config.threads else {everything, max(1, everything // 2)}
        for arithmetic in better:
            replica = arithmetic.place(copy.deepcopy(self._model))
            executor = TasksExecutor(
                replica,
                optim.SGD(replica.parameters(), momentum=config.momentum, fused=True),
                arithmetic,
                label_smoothing=config.label_smoothing,
            )
            for threads, groups in candidate_grains(self._size, sorted(counts, reverse=True)):
                executor.use(Grain(groups, threads, config.group_norms, config.priority))
                speed = measure_executor(executor, self._in_shape, self._size)
                if executor.why_not is not None:
                    return
                whole = groups * config.batch // self._size  # of a batch that is too large to try
                yield Way("tasks", arithmetic, whole, threads, speed)

    def _with_fewer_threads(self, way: Way) -> Way:
        """Try the plain executor with half the threads: small networks do not use all of them."""
        everything = torch.get_num_threads()
        fewer = max(1, everything // 2)
        torch.set_num_threads(fewer)
        try:
            found = replace(self._measured("eager", way.arithmetic), threads=fewer)
        finally:
            torch.set_num_threads(everything)
        return found if found.samples_per_s > way.samples_per_s * _MIN_GAIN else way


def _is_staged(config: Config) -> bool:
    return config.strategy == "pipeline" and not config.virtual


def has_own_convolutions() -> bool:
    """Tell whether tasks compute faster here, not only side by side; without compiling them."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def candidate_grains(size: int, thread_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return threads and groups that are worth a try for steps of some samples.

    >>> candidate_grains(128, [16, 8])
    [(16, 16), (16, 32), (8, 8)]
    """
    most = thread_counts[0]
    counts = {most, *(-(-size // samples) for samples in _GROUP_SIZES)}
    found = [(most, count) for count in sorted(counts) if most <= count <= max(1, size // 2)]
    return [*found, *((threads, threads) for threads in thread_counts[1:] if threads > 1)]


class _Memory:
    """What was found for this machine and network before, on disk."""

    def __init__(
        self, config: Config, device: torch.device, model: nn.Module, in_shape: tuple[int, ...]
    ) -> None:
        self._device = device
        processor = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
        )
        facts: list[Any] = [
            sorted(versions().items()),
            processor,
            torch.get_num_threads(),
            in_shape,
            str(model),
            *(
                getattr(config, name)
                for name in ("batch", "executor", "precision", "memory_format", "threads")
            ),
            *(config.group_norms, config.priority),
        ]
        name = digest_of_text(json.dumps(facts, default=str))[:32]
        self._path = default_cache_dir() / "ways" / f"{name}.json"

    def recall(self) -> Way | None:
        """Return what was found, unless the file is gone or not ours."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            arithmetic = Arithmetic(self._device, found["precision"], found["layout"])
            del found["precision"], found["layout"]
            return Way(arithmetic=arithmetic, **found)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, way: Way) -> None:
        """Write down what was found; a disk that refuses it costs the next run a probe."""
        found = {
            "executor": way.executor,
            "precision": way.arithmetic.precision,
            "layout": way.arithmetic.layout,
            "groups": way.groups,
            "threads": way.threads,
            "samples_per_s": way.samples_per_s,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(found))
        except OSError:
            return
