"""What stages send each other: activations to the right, gradients to the left, and a few numbers.

A message is one row of memory: the tensor as it lies, then the numbers; between neighbours on one
machine the tensor stays where both see it (slots.py). The receiver of a forward
message learns from its numbers whether it is the last one, and only then expects another.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from convoy.outer.membership import Group
from convoy.pipeline.forms import Form
from convoy.pipeline.slots import Slots


class Channel:
    """One direction between two neighbours.

    Args:
        group: carries the messages.
        peer: the neighbour's rank.
        form: of the tensors.
        numbers: that come with each.
        device: where the tensors are wanted.
        wire: where messages lie that the group can carry.
        slots: rows that both sides see; where there are none, tensors travel in the messages.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        form: Form,
        numbers: int,
        device: torch.device,
        wire: torch.device,
        slots: Slots | None = None,
    ) -> None:
        self._group, self._peer, self._form = group, peer, form
        self._numbers, self._device, self._wire = numbers, device, wire
        self._slots = slots or None
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._expected: tuple[dist.Work, Tensor, int] | None = None
        self._count = 0  # messages that were sent, or received

    def send(self, tensor: Tensor, numbers: Sequence[float], at_most: int) -> None:
        """Begin to send; waits only where more than so many messages are still on their way."""
        message = self._message(len(tensor))
        self._form.view(self._row(message, len(tensor)), len(tensor)).copy_(tensor)
        message[-self._numbers :] = torch.tensor(numbers, dtype=message.dtype)
        self._count += 1
        self._sent.append((self._group.start_send(message, self._peer), message))
        while len(self._sent) > at_most or (self._sent and self._sent[0][0].is_completed()):
            self._group.wait(self._sent.popleft()[0])

    def expect(self, samples: int) -> None:
        """Be ready for a message of so many samples, so that it arrives beside other work."""
        if self._expected is None:
            message = self._message(samples)
            self._expected = self._group.start_receive(message, self._peer), message, samples

    def receive(self, samples: int) -> tuple[Tensor, list[float]]:
        """Wait for a message of so many samples."""
        self.expect(samples)
        assert self._expected is not None
        work, message, samples = self._expected
        self._group.wait(work)
        self._expected = None
        numbers: list[float] = message[-self._numbers :].tolist()
        tensor = self._form.view(self._row(message, samples), samples)
        self._count += 1
        return tensor.to(self._device), numbers

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._group.wait(self._sent.popleft()[0])

    def _message(self, samples: int) -> Tensor:
        """Return room for what travels."""
        size = 0 if self._slots is not None else self._form.numel(samples)
        return torch.empty(size + self._numbers, dtype=self._form.dtype, device=self._wire)

    def _row(self, message: Tensor, samples: int) -> Tensor:
        """Return where the next tensor lies."""
        if self._slots is None:
            return message[: -self._numbers]
        return self._slots.row(self._count)[: self._form.numel(samples)]
