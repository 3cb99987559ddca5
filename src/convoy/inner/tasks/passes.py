"""The two passes of a part of a network as tasks: what a pipeline's stage computes.

A stage goes forward with one batch while others are still on their way back to it, and each batch
has read weights of its own. So each that is on its way has an engine, which holds its values:

    forward(x)     section 1 of the program: what the stage after it waits for
    backward(dy)   section 2: what the stage before it waits for
    gradients()    section 3: what nobody waits for but the weights
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.passes import Passes
from convoy.inner.tasks.capture import CannotCaptureError, capture_passes, first_line, layout_of
from convoy.inner.tasks.check import SAMPLES, check_same, random_samples, twin_of
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.engines import Engines
from convoy.inner.tasks.plan import Plan
from convoy.inner.tasks.recording import Recording
from convoy.inner.tasks.step import Grain, Step, named_tensors
from convoy.inner.tasks.tasks import ERROR, FORWARD, GRADIENTS, SECTIONS
from convoy.models.dropout import drop_by


class TaskPasses:
    """Runs a part of a network forward and back, as tasks.

    It is recorded when its first batch arrives. Where that cannot be done, PyTorch takes over and
    the reason is told once.

    Args:
        part: some of its blocks.
        arithmetic: how to compute.
        plain: runs them by PyTorch.
        wants_error: somebody waits for the gradient of what goes in.
        grain: how passes are cut up.
        tell: takes a sentence for the user.
        portable: use the engine that needs no compiler.
    """

    def __init__(
        self,
        part: nn.Module,
        arithmetic: Arithmetic,
        plain: Passes,
        *,
        wants_error: bool,
        grain: Grain,
        tell: Callable[[str], None],
        portable: bool = False,
    ) -> None:
        self._part, self._arithmetic, self._grain = part, arithmetic, grain
        self._plain, self._tell = plain, tell
        self._wants_error = wants_error
        self._engines = Engines(tell, portable=portable)
        self._plan: Plan | None = None
        self._made: dict[int, Step] = {}  # the first of each number of samples
        self._free: defaultdict[int, list[Step]] = defaultdict(list)  # likewise, not on their way
        self._gradients = {n: torch.zeros_like(p) for n, p in part.named_parameters()}
        self.why_not: str | None = None

    def forward(
        self, x: Tensor, keys: Tensor | None, weights: Sequence[Tensor] | None
    ) -> tuple[Tensor, Any]:
        """Return what the part makes of a batch, and what its way back needs.

        What goes in must stay as it is until the way back is done.
        """
        if self.why_not is None:
            marks = torch.arange(len(x)) if keys is None else keys
            tensors = {"images": x, "keys": marks} | self._tensors(weights)
            try:
                step = self._step_for(x, tensors)
            except Exception as error:  # whatever it is, there is another way to compute
                self._give_up(error)
            else:
                step.run(tensors, FORWARD)
                return step.logits, step
        return self._plain.forward(x, keys, weights)

    def backward(self, passage: Any, gradient: Tensor) -> Tensor | None:
        """Return the gradient of a batch's input, if somebody waits for it."""
        if not isinstance(passage, Step):
            return self._plain.backward(passage, gradient)
        passage.run({"flow": gradient}, ERROR)
        return passage.error

    def gradients(self, passage: Any) -> None:
        """Leave the gradient of each weight in its .grad."""
        if not isinstance(passage, Step):
            self._plain.gradients(passage)
            return
        passage.run({}, GRADIENTS)
        self._free[len(passage.logits)].append(passage)
        for name, parameter in self._part.named_parameters():
            parameter.grad = self._gradients[name]

    # ---------------------------------------------------------------- getting ready

    def _tensors(self, weights: Sequence[Tensor] | None) -> dict[str, Tensor]:
        own = [p.detach() for p in self._part.parameters()]
        names = [f"p:{name}" for name in self._gradients]
        found = dict(zip(names, own if weights is None else weights, strict=True))
        return found | {f"b:{name}": buffer for name, buffer in self._part.named_buffers()}

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, CannotCaptureError)
        self.why_not = str(error) if known else first_line(error)
        self._plan = None
        self._made, self._free = {}, defaultdict(list)
        self._tell(f"this stage cannot be run as tasks: {self.why_not}; it is computed by 'eager'")

    def _step_for(self, x: Tensor, tensors: dict[str, Tensor]) -> Step:
        """Return a step that is free; the first one for so many samples is cut by what it costs."""
        free = self._free[len(x)]
        if free:
            return free.pop()
        if len(x) in self._made:
            step = self._made[len(x)].twin()
            step.bind(self._places())
            return step
        if self._plan is None:
            self._plan = self._recorded(x)
        buffers = list(self._part.buffers())
        kept = [buffer.clone() for buffer in buffers]
        try:
            self._made[len(x)] = self._measured(self._plan, len(x), tensors)
        finally:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        return self._made[len(x)]

    def _recorded(self, x: Tensor) -> Plan:
        arithmetic = self._arithmetic
        if arithmetic.device.type != "cpu":
            raise CannotCaptureError("it is for CPUs")
        if not self._gradients:
            raise CannotCaptureError("it has no weights")
        self._engines.prepare()
        recording = capture_passes(self._part, arithmetic, x, wants_error=self._wants_error)
        given = [recording.logits, *([recording.error] if self._wants_error else [])]
        if any(recording.batched.get(value) != 0 for value in given):
            raise CannotCaptureError("what it passes on has no samples in its first dimension")
        self._check(recording, x)
        hands = self._engines.hands(arithmetic)
        return decompose(recording, norms=self._grain.norms, hands=hands)

    def _measured(self, plan: Plan, samples: int, tensors: dict[str, Tensor]) -> Step:
        step = Step(plan, samples, self._grain.fitted(samples), None, self._engines.make)
        step.bind(self._places())
        step.run(tensors, FORWARD)
        step.measure({"flow": torch.zeros_like(step.logits)})
        return step

    def _places(self) -> dict[str, Tensor]:
        return {f"g:{name}": gradient for name, gradient in self._gradients.items()}

    def _check(self, recording: Recording, like: Tensor) -> None:
        """Compare with plain PyTorch on a few samples in two groups.

        Raises:
            CannotCaptureError: the tasks give other gradients.
        """
        part, way = twin_of(self._part, self._arithmetic)
        wants_error = self._wants_error
        if way != self._arithmetic:
            like = like.to(way.dtype)
            recording = capture_passes(part, way, like, wants_error=wants_error)
        hands = self._engines.hands(self._arithmetic)
        plan = decompose(copy.deepcopy(recording), hands=hands)
        x, keys = random_samples(like.shape[1:], layout_of(like), like.dtype), torch.arange(SAMPLES)
        twin = copy.deepcopy(part).train()
        with drop_by(keys), way.autocast():
            y = twin(x.requires_grad_(wants_error))
        flow = random_samples(y.shape[1:], layout_of(y), y.dtype)
        y.backward(flow)
        trial = Step(plan, SAMPLES, Grain(2, 1), None, self._engines.make)
        gradients = {n: torch.zeros_like(p) for n, p in part.named_parameters()}
        trial.bind(named_tensors(part, gradients) | {"images": x.detach(), "keys": keys})
        for section in SECTIONS:
            trial.run({"flow": flow}, section)
        ours, theirs = [trial.logits, *gradients.values()], [y.detach()]
        theirs += [p.grad for p in twin.parameters() if p.grad is not None]
        if trial.error is not None and x.grad is not None:
            ours, theirs = [*ours, trial.error], [*theirs, x.grad]
        check_same(ours, theirs, way.precision)
