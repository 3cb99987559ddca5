"""A training step on tensors that never move, so that it can be recorded and replayed.

in:   images, labels, keys    copied to a slot, one for each size of batch
      scale, rate             numbers on the device, which every recording reads
work: forward, loss, backward | update
out:  weights, momentum, statistics    where they always are
      gradients                        for the halves: in tensors of our own
      loss, correct                    in a ring
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from convoy.data.batches import Batch
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Sums
from convoy.inner.optimizer import hold_momentum
from convoy.inner.recorder import Recorder, Replay
from convoy.inner.ring import Ring
from convoy.models.dropout import SampleDropout

_SLOTS_AT_MOST = 8  # sizes of batches; a share that changes all the time must not fill the memory


class FixedStep:
    """The halves of a step, and both at once, each as one recording.

    Args:
        eager: computes the same, operation by operation, on the same network.
        recorder: records.

    All calls may raise RecordingError; nothing has been done then.
    """

    def __init__(self, eager: EagerExecutor, recorder: Recorder) -> None:
        self._eager = eager
        self._optimizer = eager.optimizer
        self._recorder = recorder
        model, arithmetic = eager.model, eager.arithmetic
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = self._read_addresses()
        self._drops = any(isinstance(module, SampleDropout) for module in model.modules())
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._updates: dict[tuple[bool, ...], Replay] = {}
        self._gradients: list[Tensor] = []
        self._reached: list[bool] = []  # by the backward pass
        self._momentum: dict[Tensor, Tensor] = {}
        self._ring = Ring(arithmetic)
        self._scale = _Number(arithmetic.device, arithmetic.dtype)
        # The fused update reads its rate as fp32 on a GPU, whatever the weights are.
        on_gpu = arithmetic.device.type == "cuda"
        self._rate = _Number(arithmetic.device, torch.float32 if on_gpu else torch.float64)

    @property
    def is_stale(self) -> bool:
        """Tell whether weights or statistics lie elsewhere by now: recordings miss them."""
        return self._read_addresses() != self._addresses

    def gradients(self, batch: Batch, divisor: float) -> Sums:
        """Leave the gradient of (sum of losses / divisor) in each parameter's .grad."""
        self._make_gradients()
        slot = self._fill_slot(batch, divisor)
        slot.gradients.run(partial(self._differentiate_only, slot.batch), self._recorder)
        for parameter, gradient, reached in zip(
            self._parameters, self._gradients, self._reached, strict=True
        ):
            parameter.grad = gradient if reached else None
        return self._ring.take(batch.labels)

    def update(self, learning_rate: float) -> None:
        """Apply the gradients, wherever they lie, to the weights."""
        self._make_gradients()
        self._prepare_update(learning_rate)
        found = [parameter.grad for parameter in self._parameters]
        pairs = list(zip(self._gradients, found, strict=True))
        self._copy([(mine, given) for mine, given in pairs if given is not mine])
        ours = [None if given is None else mine for mine, given in pairs]
        present = tuple(gradient is not None for gradient in ours)
        self._updates.setdefault(present, Replay()).run(partial(self._apply, ours), self._recorder)

    def step(self, batch: Batch, divisor: float, learning_rate: float) -> Sums:
        """Do both halves as one."""
        self._prepare_update(learning_rate)
        slot = self._fill_slot(batch, divisor)
        slot.step.run(partial(self._differentiate_and_apply, slot.batch), self._recorder)
        return self._ring.take(batch.labels)

    # ---------------------------------------------------------------- before the work

    def _make_gradients(self) -> None:
        """Make places for gradients, if there are none: who asks for whole steps needs none."""
        if not self._gradients:
            self._gradients = [torch.empty_like(p, requires_grad=False) for p in self._parameters]

    def _read_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _fill_slot(self, batch: Batch, divisor: float) -> "_Slot":
        """Copy a batch to the slot of its size; the one that was not used for longest goes."""
        model = self._eager.model
        if not model.training:
            model.train()
        self._scale.set(1 / divisor)
        if not self._drops:
            batch = Batch(batch.images_NCHW, batch.labels)
        key = (batch.images_NCHW.shape, batch.keys is None)
        if key not in self._slots:
            while len(self._slots) >= _SLOTS_AT_MOST:
                self._slots.popitem(last=False)
            self._slots[key] = _Slot(batch)
        slot = self._slots[key]
        self._slots.move_to_end(key)
        slot.fill(batch)
        return slot

    def _prepare_update(self, learning_rate: float) -> None:
        hold_momentum(self._optimizer, self._momentum)
        self._rate.set(learning_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    # ---------------------------------------------------------------- the work: may be recorded

    def _differentiate_only(self, batch: Batch) -> None:
        loss, logits, found = self._differentiate(batch)
        self._reached = [gradient is not None for gradient in found]
        self._copy(list(zip(self._gradients, found, strict=True)))
        self._ring.put(loss, logits, batch.labels)

    def _differentiate_and_apply(self, batch: Batch) -> None:
        loss, logits, found = self._differentiate(batch)
        pairs = zip(found, self._parameters, strict=True)
        self._apply([None if g is None else _laid_out_like(g, p) for g, p in pairs])
        self._ring.put(loss, logits, batch.labels)

    def _differentiate(self, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        loss, logits = self._eager.forward(batch)
        # Not `backward`: it would call those who send gradients off as soon as they are made.
        found = torch.autograd.grad(
            loss, self._parameters, self._scale.tensor.to(loss.dtype), allow_unused=True
        )
        return loss.detach(), logits.detach(), found

    def _apply(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the optimizer take a step with gradients and a rate that lie at fixed places."""
        former = [parameter.grad for parameter in self._parameters]
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            self._set_gradients(gradients)
            for group in groups:
                group["lr"] = self._rate.tensor
            self._optimizer.step()
        finally:
            self._set_gradients(former)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    @staticmethod
    def _copy(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Copy the second of each pair to the first, where there is one."""
        given = [(to, source) for to, source in pairs if source is not None]
        if given:
            torch._foreach_copy_([to for to, _ in given], [source for _, source in given])


class _Slot:
    """Where batches of one size go, and the recordings that read them there."""

    def __init__(self, batch: Batch) -> None:
        keys = None if batch.keys is None else torch.empty_like(batch.keys)
        images, labels = torch.empty_like(batch.images_NCHW), torch.empty_like(batch.labels)
        self.batch = Batch(images, labels, keys)
        self.gradients, self.step = Replay(), Replay()

    def fill(self, batch: Batch) -> None:
        """Copy a batch here."""
        self.batch.images_NCHW.copy_(batch.images_NCHW, non_blocking=True)
        self.batch.labels.copy_(batch.labels, non_blocking=True)
        if self.batch.keys is not None and batch.keys is not None:
            self.batch.keys.copy_(batch.keys, non_blocking=True)


class _Number:
    """A number on the device, which is written only when it changes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros((), dtype=dtype, device=device)
        self._value = 0.0

    def set(self, value: float) -> None:
        """Set it, for whatever is launched from here on."""
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value


def _laid_out_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that lies in memory as its weight does: the fused update asks for it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
