"""The sums of the last steps, kept on the device until somebody reads them."""

import torch
from torch import Tensor

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import SUMS_KEPT, Sums

_PLACES = 2 * SUMS_KEPT


class Ring:
    """Takes the sums of a step at a place of their own, from where they can be read later.

    A recorded step always writes to the same address. So which place is next stands on the
    device, and the step itself moves it on.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        device = arithmetic.device
        self._losses = torch.zeros(_PLACES, dtype=arithmetic.dtype, device=device)
        self._corrects = torch.zeros(_PLACES, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0  # the same, known here

    def put(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Write a step's sums, as the last part of it; this may be recorded."""
        correct = (logits.argmax(1) == labels).sum()
        self._losses.index_copy_(0, self._place, loss.to(self._losses.dtype).view(1))
        self._corrects.index_copy_(0, self._place, correct.view(1))
        self._place.add_(1)

    def take(self, labels: Tensor) -> Sums:
        """Return the sums that the step just done has put here, or will have."""
        place = self._next
        self._next += 1
        if self._next == _PLACES:
            self._place.zero_()
            self._next = 0
        return Sums(self._losses[place], None, labels, self._corrects[place])
