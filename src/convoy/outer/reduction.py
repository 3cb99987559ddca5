"""Gradient sums of all nodes: packed into few messages, sent while the rest is still computed.

The weights are cut into buckets from the last layer to the first, as back-propagation delivers
their gradients. A bucket goes out as soon as it is complete, in the same order on every node.
A network that fits into one bucket is sent once, with the step's other numbers at its end.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.collectives.allreduce import Summing
from convoy.outer.membership import Group

_BUCKET_BYTES = 4 << 20


class StepSums(Protocol):
    """What nodes add up in a step: numbers, and whatever else they agree on."""

    def begin(self, group: Group, ready: Collection[Tensor] = ()) -> None:
        """Get ready for a step; the gradients of `ready` are there."""
        ...

    def finish(self, extras: Tensor) -> Tensor:
        """Return the sums of the step's numbers, when all is added up."""
        ...

    def close(self) -> None:
        """Take no part in steps any more."""
        ...


class Reduction:
    """Adds up a network's gradients and some numbers over the members of a group.

    Args:
        model: its parameters' `.grad` are what is added up.
        extras: how many numbers travel along.
        wire: the type in which gradients travel.
        on_gpu: the group's messages stay on the GPU.
        overlap: send buckets during the backward pass, where there is more than one.
        same_layout: all members keep their weights in the same order in memory, so that
            gradients can travel in that order; otherwise each element has one fixed place.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        extras: int,
        wire: torch.dtype | None = None,
        on_gpu: bool = False,
        overlap: bool = True,
        same_layout: bool = True,
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        first = self._parameters[0]
        self._device, self._dtype = first.device, first.dtype
        self._wire_device = first.device if on_gpu else torch.device("cpu")
        self._wire = wire or first.dtype
        self._extras = extras
        size = sum(p.numel() for p in self._parameters)
        self._flat = torch.zeros(size + extras, dtype=self._dtype, device=self._device)
        self._buckets = _cut(self._parameters, self._flat, overlap=overlap, same_layout=same_layout)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._group: Group | None = None
        self._messages: list[tuple[Tensor, Tensor, dist.Work | Summing]] = []

    @property
    def last_message(self) -> int:
        """Return how many numbers the last message of a step holds: the one that is waited for."""
        return self._flat.numel() if self._is_one_message else self._extras

    @property
    def _is_one_message(self) -> bool:
        return not self.overlaps and self._wire == self._dtype

    @property
    def overlaps(self) -> bool:
        """Tell whether there is anything to send before the backward pass is over."""
        return len(self._buckets) > 1

    def watch(self) -> None:
        """Notice each gradient as it is made."""
        for bucket in self._buckets if self.overlaps else ():
            for parameter in bucket.parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._note(bucket))
                self._handles.append(hook)

    def close(self) -> None:
        """Stop noticing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, group: Group, ready: Collection[Tensor] = ()) -> None:
        """Get ready for a step: gradients go out from here on; those of `ready` are there."""
        self._group = group
        self._messages.clear()
        known = {id(parameter) for parameter in ready}
        for bucket in self._buckets:
            bucket.missing = sum(id(parameter) not in known for parameter in bucket.parameters)
            bucket.sent = False
        if self._is_one_message and self._wire_device == self._device:
            group.expect(self._flat)

    def finish(self, extras: Tensor) -> Tensor:
        """Send what has not been sent, wait for all; return the sums of the extra numbers."""
        group = self._group
        assert group is not None
        if self._is_one_message:
            (bucket,) = self._buckets
            bucket.pack()
            self._flat[-self._extras :] = extras
            self._sum(self._flat)
        else:
            self._send_complete(forced=True)
            self._flat[-self._extras :] = extras
            for wire, target, work in self._messages:
                group.wait(work)
                if wire is not target:
                    target.copy_(wire)
            self._sum(self._flat[-self._extras :])
        for bucket in self._buckets:
            bucket.unpack()
        return self._flat[-self._extras :]

    def _note(self, bucket: "_Bucket") -> Callable[[Tensor], None]:
        def noted(parameter: Tensor) -> None:
            del parameter
            bucket.missing -= 1
            if bucket.missing == 0 and self._group is not None:
                self._send_complete(forced=False)

        return noted

    def _send_complete(self, *, forced: bool) -> None:
        """Send the buckets that are complete, in order; `forced` sends the rest as it is."""
        for bucket in self._buckets:
            if bucket.sent:
                continue
            if bucket.missing and not forced:
                return  # an earlier one must go first: the order is the same on all nodes
            bucket.pack()
            self._send(bucket.flat)
            bucket.sent = True

    def _sum(self, values: Tensor) -> None:
        """Add up a last message, with nothing left to do meanwhile."""
        assert self._group is not None
        wire = values.to(self._wire_device)
        self._group.sum(wire)
        if wire is not values:
            values.copy_(wire)

    def _send(self, values: Tensor) -> None:
        assert self._group is not None
        wire = values.to(self._wire_device, self._wire)
        self._messages.append((wire, values, self._group.start_sum(wire)))


class _Bucket:
    """Some parameters, and the stretch of the flat buffer that holds their gradients."""

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor, *, same_layout: bool) -> None:
        self.parameters = parameters
        self.flat = flat
        shape = _shaped_like if same_layout else _plain
        parts = flat.split([parameter.numel() for parameter in parameters])
        self._views = [shape(part, p) for part, p in zip(parts, parameters, strict=True)]
        self.missing = 0
        self.sent = False

    def pack(self) -> None:
        """Copy the gradients into the buffer; a parameter without one counts as zero."""
        views, gradients = [], []
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                views.append(view)
                gradients.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, gradients)

    def unpack(self) -> None:
        """Make the buffer's contents the gradients."""
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if view.stride() == parameter.stride():
                parameter.grad = view
            else:  # the optimizer is fast only where gradients lie in memory as weights do
                parameter.grad = torch.empty_like(parameter).copy_(view)


def _cut(
    parameters: Sequence[Tensor], flat: Tensor, *, overlap: bool, same_layout: bool
) -> list[_Bucket]:
    """Cut the parameters into buckets, last layer first."""
    backwards = list(reversed(parameters))
    limit = _BUCKET_BYTES // flat.element_size() if overlap else flat.numel()
    groups: list[list[Tensor]] = [[]]
    for parameter in backwards:
        held = sum(p.numel() for p in groups[-1])
        if held and held + parameter.numel() > limit:
            groups.append([])
        groups[-1].append(parameter)
    sizes = [sum(p.numel() for p in group) for group in groups]
    stretches = flat[: sum(sizes)].split(sizes)
    pairs = zip(groups, stretches, strict=True)
    return [_Bucket(group, part, same_layout=same_layout) for group, part in pairs]


def _shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    """View a stretch of memory with a parameter's shape and order of elements in memory."""
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def _plain(part: Tensor, parameter: Tensor) -> Tensor:
    """View a stretch of memory with a parameter's shape, in the order that needs no agreement."""
    return part.view(parameter.shape)
