"""The executor `tasks`: a step as a graph of tasks on all cores of a node.

A network is recorded when its first batch arrives, and written out for each batch size that
comes up. Where that cannot be done, the plain executor takes over and the reason is told once.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn, optim

from convoy.data.batches import Batch
from convoy.errors import ConvoyError
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Sums
from convoy.inner.tasks.capture import CannotCaptureError, capture, first_line
from convoy.inner.tasks.check import SAMPLES, Trial, random_samples
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.engines import Engines
from convoy.inner.tasks.instructions import Sgd
from convoy.inner.tasks.plan import Plan
from convoy.inner.tasks.recording import Recording, refs_in
from convoy.inner.tasks.step import Grain, Step, named_tensors
from convoy.inner.tasks.timeline import Timeline

_STEPS_KEPT = 8  # programs, for as many batch sizes


class TasksExecutor:
    """Computes steps as tasks on several threads.

    Args:
        grain: how steps are cut up; None: by the batch and the cores.
        portable: use the engine that needs no compiler.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float = 0.0,
        tell: Callable[[str], None] | None = None,
        grain: Grain | None = None,
        portable: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.arithmetic = arithmetic
        self._tell = tell or (lambda why: None)
        self._label_smoothing = label_smoothing
        self._eager = EagerExecutor(model, optimizer, arithmetic, label_smoothing=label_smoothing)
        self._grain = grain
        self._engines = Engines(self._tell, portable=portable)
        self._plan: Plan | None = None
        self._why_not: str | None = None
        self._is_keyed = False  # whether samples' keys are asked for
        self._steps: OrderedDict[tuple[int, bool], Step] = OrderedDict()
        self._bound: dict[tuple[int, bool], tuple[int, ...]] = {}
        # Where the network keeps its tensors: somebody may put others there.
        self._parameters = _kept_in(model, "_parameters")
        self._buffers = _kept_in(model, "_buffers")
        self._gradients = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        dtype = arithmetic.dtype
        self._scale, self._loss = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
        self._rate = torch.zeros((), dtype=torch.float64)

    # ------------------------------------------------------------ the contract

    def gradients(self, batch: Batch, divisor: float) -> Sums:
        """Leave the gradient of (sum of losses / divisor) in each parameter's .grad."""
        if not self._is_ready(batch):
            return self._eager.gradients(batch, divisor)
        sums = self._run(batch, divisor, updating=False)
        if sums is None:
            return self._eager.gradients(batch, divisor)
        for name, parameter in self.model.named_parameters():
            parameter.grad = self._gradients[name]
        return sums

    def update(self, learning_rate: float) -> None:
        """Apply the gradients to the weights."""
        self._eager.update(learning_rate)

    def step(self, batch: Batch, divisor: float, learning_rate: float) -> Sums:
        """Do both halves; a layer's weights move as soon as nobody reads them any more."""
        if self._is_ready(batch):
            self._rate.fill_(learning_rate)
            sums = self._run(batch, divisor, updating=True)
            if sums is not None:
                return sums
        return self._eager.step(batch, divisor, learning_rate)

    def evaluate(self, batch: Batch, *, mirrored: bool = False) -> Sums:
        """Run a batch through without learning from it."""
        return self._eager.evaluate(batch, mirrored=mirrored)

    # ------------------------------------------------------------ for people

    @property
    def why_not(self) -> str | None:
        """Return why the plain executor does the work, if it does."""
        return self._why_not

    def use(self, grain: Grain) -> None:
        """Cut steps up in another way from now on."""
        if self._plan is not None and grain.norms != self._given_grain.norms:
            raise ValueError("the choice of batch-norm's statistics is part of the recording")
        self._grain = grain
        self._steps.clear()
        self._bound.clear()

    def trace(self, batch: Batch, divisor: float) -> Timeline:
        """Do a step and return what happened; the weights stay as they are.

        Raises:
            ConvoyError: there are no tasks to see.
        """
        if not self._is_ready(batch):
            raise ConvoyError(f"there are no tasks to trace: {self._why_not}")
        self._rate.fill_(0.0)
        changing = self._changing()
        kept = [tensor.detach().clone() for tensor in changing]
        sums = self._run(batch, divisor, updating=True)
        self._put_back(changing, kept)
        if sums is None:
            raise ConvoyError(f"there are no tasks to trace: {self._why_not}")
        return self._steps[len(batch), True].timeline()

    def last_timeline(self) -> Timeline | None:
        """Return what happened in the last step; it costs nothing to have been watched."""
        return next(reversed(self._steps.values())).timeline() if self._steps else None

    # ------------------------------------------------------------ getting ready

    def _is_ready(self, batch: Batch) -> bool:
        """Record the network if that was not tried yet; tell whether it worked."""
        if self._plan is None and self._why_not is None:
            try:
                if self.arithmetic.device.type != "cpu":
                    raise CannotCaptureError("it is for CPUs")
                self._prepare(batch)
            except CannotCaptureError as error:
                self._give_up(f"this network cannot be run as tasks: {error}")
            except Exception as error:  # whatever it is, there is another way to train
                self._give_up(f"a step as tasks failed: {first_line(error)}")
        # Without keys, dropout draws anew each time, as a recorded step cannot.
        recorded = self._plan is not None and (batch.keys is not None or not self._is_keyed)
        return recorded and len(batch) > 0

    def _prepare(self, batch: Batch) -> None:
        _, *rest = batch.images_NCHW.shape
        channels, height, width = rest
        shape = (channels, height, width)
        smoothing = self._label_smoothing
        recording = capture(self.model, self.arithmetic, shape, label_smoothing=smoothing)
        self._engines.prepare()
        self._is_keyed = any(recording.keys in refs_in(call) for call in recording.operations)
        self._check(recording, shape)
        norms = self._given_grain.norms
        self._plan = decompose(recording, norms=norms, hands=self._engines.hands(self.arithmetic))

    def _check(self, recording: Recording, shape: tuple[int, int, int]) -> None:
        """Compare with plain PyTorch on a few samples.

        Raises:
            CannotCaptureError: the tasks find something else.
        """
        smoothing = self._label_smoothing

        def record(model: nn.Module, way: Arithmetic) -> Recording:
            if way == self.arithmetic:
                return copy.deepcopy(recording)
            return capture(model, way, shape, label_smoothing=smoothing)

        trial = Trial(self.model, self.arithmetic, self._engines, record)
        plain, way = trial.plain, trial.way
        images = random_samples(shape, way.memory_format, way.dtype)
        keys = labels = torch.arange(SAMPLES)  # no label can pass for another
        batch = Batch(images, labels % recording.shapes[recording.logits][1], keys)
        eager = EagerExecutor(plain, optim.SGD(plain.parameters()), way, label_smoothing=smoothing)
        sums = eager.gradients(batch, SAMPLES)
        assert sums.logits is not None
        loss = torch.zeros((), dtype=way.dtype)
        scale = torch.tensor(1 / SAMPLES, dtype=way.dtype)
        trial.step.run(_inputs(batch, keys) | {"scale": scale, "loss": loss})
        trial.compare(
            {"answers": [trial.step.logits], "loss": [loss]},
            {"answers": [sums.logits], "loss": [sums.loss]},
        )

    @property
    def _given_grain(self) -> Grain:
        return self._grain or Grain(0, torch.get_num_threads())

    def _give_up(self, why: str) -> None:
        self._why_not = why
        self._plan = None
        self._steps.clear()
        self._bound.clear()
        self._tell(f"{why}; training goes on with the executor 'eager'")

    # ------------------------------------------------------------ running

    def _run(self, batch: Batch, divisor: float, *, updating: bool) -> Sums | None:
        """Do a step; None where it failed, with everything as it was before."""
        self._scale.fill_(1 / divisor)
        key = (len(batch), updating)
        keys = batch.keys if batch.keys is not None else torch.arange(len(batch))
        if key in self._steps:
            self._steps.move_to_end(key)
            self._bind(key)
            self._steps[key].run(_inputs(batch, keys))
        elif not self._first_run(key, _inputs(batch, keys)):
            return None
        return Sums(self._loss.clone(), self._steps[key].logits, batch.labels)

    def _first_run(self, key: tuple[int, bool], inputs: dict[str, Tensor]) -> bool:
        """Write a program for a new batch size, measure it, and do its first step, if it can be."""
        plan = self._plan
        assert plan is not None
        changing = self._changing()
        kept = [tensor.detach().clone() for tensor in changing]
        try:
            grain = self._given_grain.fitted(key[0])
            step = Step(plan, key[0], grain, self._sgd() if key[1] else None, self._engines.make)
            self._steps[key] = step
            if len(self._steps) > _STEPS_KEPT:
                old, _ = self._steps.popitem(last=False)
                del self._bound[old]
            self._bind(key)
            step.measure(inputs)
            self._put_back(changing, kept)
            step.run(inputs)
        except Exception as error:  # whatever it is, there is another way to train
            self._put_back(changing, kept)
            self._give_up(f"a step as tasks failed: {first_line(error)}")
            return False
        return True

    def _changing(self) -> list[Tensor]:
        """Return all that a step changes; asked for at each step, so the network is not walked."""
        parameters = [held[name] for held, name in self._parameters]
        buffers = [held[name] for held, name in self._buffers]
        if not self._sgd().momentum:
            return parameters + buffers
        state = self.optimizer.state
        if any(state[p].get("momentum_buffer") is None for p in parameters):
            self._momentum()
        return [*parameters, *buffers, *(state[p]["momentum_buffer"] for p in parameters)]

    @torch.no_grad()
    def _put_back(self, changing: list[Tensor], kept: list[Tensor]) -> None:
        for tensor, value in zip(changing, kept, strict=True):
            tensor.copy_(value)

    def _bind(self, key: tuple[int, bool]) -> None:
        """Hand over the tensors, unless they are the ones that the engine has."""
        tensors = self._changing()
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if self._bound.get(key) != addresses:
            self._steps[key].bind(self._tensors(self.model))
            self._bound[key] = addresses

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        found = {"scale": self._scale, "loss": self._loss, "rate": self._rate}
        found |= named_tensors(model, self._gradients)
        found |= {f"m:{name}": m for name, m in self._momentum().items()}
        return found

    def _momentum(self) -> dict[str, Tensor]:
        """Return SGD's memory of each weight; a weight without any starts with nothing."""
        if not self._sgd().momentum:
            return {}
        state = self.optimizer.state
        for parameter in self.model.parameters():
            if state[parameter].get("momentum_buffer") is None:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state[parameter]["momentum_buffer"] = zeros
        return {n: state[p]["momentum_buffer"] for n, p in self.model.named_parameters()}

    def _sgd(self) -> Sgd:
        group = self.optimizer.param_groups[0]
        return Sgd(group["momentum"], group["nesterov"], group["weight_decay"])


def _kept_in(model: nn.Module, kind: str) -> list[tuple[dict[str, Tensor], str]]:
    """Return the tables of a network's modules in which its tensors are, with their names there."""
    tables: list[dict[str, Tensor | None]] = [getattr(m, kind) for m in model.modules()]
    found = [(table, name) for table in tables for name, held in table.items() if held is not None]
    return cast("list[tuple[dict[str, Tensor], str]]", found)


def _inputs(batch: Batch, keys: Tensor) -> dict[str, Tensor]:
    return {"images": batch.images_NCHW, "labels": batch.labels, "keys": keys}
