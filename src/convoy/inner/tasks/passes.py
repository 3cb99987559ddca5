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
from convoy.inner.tasks.check import SAMPLES, Trial, random_samples
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.engines import Engines
from convoy.inner.tasks.plan import Plan
from convoy.inner.tasks.recording import Recording
from convoy.inner.tasks.step import Grain, Step
from convoy.inner.tasks.tasks import ERROR, FORWARD, GRADIENTS, SECTIONS
from convoy.models.dropout import drop_by


class TaskPasses:
    """Runs a part of a network forward and back, as tasks.

    It is recorded when its first batch arrives. Where that cannot be done, PyTorch takes over and
    the reason is told once.

    Args:
        part: some of its blocks.
        arithmetic: how to compute.
        plain: runs them by PyTorch; another may take its place between two batches.
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
        self.plain, self._tell = plain, tell
        self._wants_error = wants_error
        self._engines = Engines(tell, portable=portable)
        self._plan: Plan | None = None
        self._patterns: dict[int, Step] = {}  # for each number of samples, how it is cut
        self._free: defaultdict[int, list[Step]] = defaultdict(list)  # made like them, not in use
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
            try:
                if self._plan is None:
                    self._plan = self._recorded(x)
                tensors = {"images": x, "keys": marks} | self._tensors(weights)
                step = self._step_for(self._plan, tensors)
            except Exception as error:  # whatever it is, there is another way to compute
                self._give_up(error)
            else:
                step.run(tensors, FORWARD)
                return step.logits, step
        return self.plain.forward(x, keys, weights)

    def backward(self, passage: Any, gradient: Tensor) -> Tensor | None:
        """Return the gradient of a batch's input, if somebody waits for it."""
        if not isinstance(passage, Step):
            return self.plain.backward(passage, gradient)
        passage.run({"flow": gradient}, ERROR)
        return passage.error

    def gradients(self, passage: Any) -> None:
        """Leave the gradient of each weight in its .grad."""
        if not isinstance(passage, Step):
            self.plain.gradients(passage)
            return
        passage.run({}, GRADIENTS)
        self._free[len(passage.logits)].append(passage)
        self._let_go(passage)
        for name, parameter in self._part.named_parameters():
            parameter.grad = self._gradients[name]

    # ---------------------------------------------------------------- getting ready

    def _tensors(self, weights: Sequence[Tensor] | None) -> dict[str, Tensor]:
        own = [p.detach() for p in self._part.parameters()]
        names = [f"p:{name}" for name in self._gradients]
        found = dict(zip(names, own if weights is None else weights, strict=True))
        return found | {f"b:{name}": buffer for name, buffer in self._part.named_buffers()}

    def _let_go(self, step: Step) -> None:
        """Have a step hold nothing of a batch, nor weights that were kept for it."""
        step.bind(self._tensors(None))
        step.forget_batch()

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, CannotCaptureError)
        self.why_not = str(error) if known else first_line(error)
        self._plan = None
        self._patterns, self._free = {}, defaultdict(list)
        self._tell(f"this stage cannot be run as tasks: {self.why_not}; it is computed by 'eager'")

    def _step_for(self, plan: Plan, tensors: dict[str, Tensor]) -> Step:
        """Return a step that is free; the first one for so many samples is cut by what it costs."""
        samples = len(tensors["images"])
        if self._free[samples]:
            return self._free[samples].pop()
        if samples not in self._patterns:
            buffers = list(self._part.buffers())
            kept = [buffer.clone() for buffer in buffers]
            try:
                self._patterns[samples] = self._measured(plan, samples, tensors)
            finally:
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
        step = self._patterns[samples].twin()
        step.bind(self._places())
        return step

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
        self._let_go(step)
        return step

    def _places(self) -> dict[str, Tensor]:
        return {f"g:{name}": gradient for name, gradient in self._gradients.items()}

    def _check(self, recording: Recording, like: Tensor) -> None:
        """Compare with plain PyTorch on a few samples.

        Raises:
            CannotCaptureError: the tasks find something else.
        """
        wants_error = self._wants_error

        def record(part: nn.Module, way: Arithmetic) -> Recording:
            if way == self._arithmetic:
                return copy.deepcopy(recording)
            return capture_passes(part, way, like.to(way.dtype), wants_error=wants_error)

        trial = Trial(self._part, self._arithmetic, self._engines, record)
        step, keys = trial.step, torch.arange(SAMPLES)
        x = random_samples(like.shape[1:], layout_of(like), trial.way.dtype)
        with drop_by(keys), trial.way.autocast():
            y = trial.plain(x.requires_grad_(wants_error))
        flow = random_samples(y.shape[1:], layout_of(y), y.dtype)
        y.backward(flow)
        for section in SECTIONS:
            step.run({"images": x.detach(), "keys": keys, "flow": flow}, section)
        errors = [] if step.error is None or x.grad is None else [(step.error, x.grad)]
        trial.compare(
            {"results": [step.logits], "error": [ours for ours, _ in errors]},
            {"results": [y], "error": [theirs for _, theirs in errors]},
        )
