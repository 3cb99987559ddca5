"""What of a recorded step is done for each group of samples, and what is done once.

Every value of a step is one of three kinds:

    shared     the same for all samples: weights, and what is made of weights alone
    batched    has a place for each sample, so that each group has its own part
    partial    a sum over samples: each group finds its part, the parts are added up

Samples meet in two places only. Gradients of weights are sums over all samples, and batch-norm
needs the statistics of the whole batch (norms.py). Any other operation that makes one number of
many samples is refused: it could not be split without changing the result.
"""

from collections import Counter
from typing import Any, Literal

import torch

from convoy.inner.tasks.capture import CannotCaptureError
from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.lowering import Lowering, all_in
from convoy.inner.tasks.norms import OPS
from convoy.inner.tasks.plan import Part, Plan
from convoy.inner.tasks.recording import Operation, Recording, refs_in
from convoy.inner.tasks.wide import widen

_aten = torch.ops.aten
_NO_HANDS = Hands()

# What these make of samples is a sum over samples, by the number of the output.
_SUMS: dict[Any, frozenset[int]] = {
    _aten.sum.dim_IntList: frozenset({0}),
    _aten.sum.default: frozenset({0}),
    _aten.mm.default: frozenset({0}),
    _aten.convolution_backward.default: frozenset({1, 2}),
    _aten.nll_loss_forward.default: frozenset({0, 1}),
    _aten.embedding_dense_backward.default: frozenset({0}),
    _aten.native_group_norm_backward.default: frozenset({1, 2}),
    _aten.native_layer_norm_backward.default: frozenset({1, 2}),
    OPS.direct_parts.default: frozenset({1}),
    OPS.bias_gradient.default: frozenset({0}),
    OPS.direct_gradient.default: frozenset({0}),
    OPS.winograd_parts.default: frozenset({1}),
    OPS.winograd_back.default: frozenset({1}),
    OPS.winograd_gradient.default: frozenset({0}),
    OPS.pairs_parts.default: frozenset({1}),
    OPS.pairs_back.default: frozenset({1}),
    OPS.pairs_gradient.default: frozenset({0}),
    OPS.norm_parts.default: frozenset({0}),
    OPS.norm_back_parts.default: frozenset({0}),
    OPS.rectified_parts.default: frozenset({1}),
    OPS.norm_back_total.default: frozenset({1, 2}),
}
_FOR_NORMS = frozenset(
    {
        OPS.norm_parts.default,
        OPS.norm_back_parts.default,
        OPS.rectified_parts.default,
        OPS.winograd_back.default,
        OPS.pairs_back.default,
    }
)
# What these give belongs to a group, though it has no place for each sample.
_OWN: dict[Any, frozenset[int]] = {
    OPS.norm_total.default: frozenset({0}),
    OPS.norm_apply.default: frozenset({0}),
    OPS.norm_back_total.default: frozenset({0}),
    OPS.norm_back_apply.default: frozenset({0}),
}
# Of a sum they make the sum of what they make of its parts.
_LINEAR = frozenset(
    {
        _aten._to_copy.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.squeeze.dim,
        _aten.unsqueeze.default,
        _aten.detach.default,
        _aten.clone.default,
        _aten.neg.default,
        _aten.mul.Scalar,  # by a number: smoothed labels
        _aten.mul.Tensor,
        _aten.div.Scalar,
        _aten.div.Tensor,
    }
)


def decompose(
    recording: Recording, *, norms: Literal["batch", "group"] = "batch", hands: Hands = _NO_HANDS
) -> Plan:
    """Sort a step into what each group does and what is done once.

    Args:
        recording: the step.
        norms: batch-norm's statistics are those of the whole batch, or each group's own.
        hands: what the processor can do for our own convolutions.

    Raises:
        CannotCaptureError: an operation makes something else than a sum of many samples.
    """
    lowered, updated = Lowering(recording, norms, hands).run()
    plan = Plan([], {}, recording, updated)
    _classify(plan, lowered)
    _name_layers(plan)
    _mark(plan)
    widen(plan)
    return plan


# ---------------------------------------------------------------- kinds of values


def _classify(plan: Plan, operations: list[Operation]) -> None:
    recording, kinds = plan.recording, plan.kinds
    for value in (*recording.parameters.values(), *recording.buffers.values(), recording.scale):
        kinds[value] = "shared"
    for value in (recording.images, recording.labels, recording.keys, recording.flow):
        kinds[value] = "batched"
    for operation in operations:
        if all_in(operation):
            _note(plan, operation, "shared", per_group=False)
            continue
        read = [kinds[value] for value in refs_in(operation)]
        if "partial" in read and not _takes_partial(operation, kinds):
            raise CannotCaptureError(f"{operation.op} needs a sum over all samples in mid-step")
        if "batched" in read or operation.op in _OWN:
            _note_batched(plan, operation)
        elif "partial" in read:
            _note(plan, operation, "partial", per_group=True)
        elif any(out in recording.batched for out in operation.outs):
            _note(plan, operation, "batched", per_group=True)
        else:
            _note(plan, operation, "shared", per_group=False)


def _note(plan: Plan, operation: Operation, kind: str, *, per_group: bool) -> None:
    plan.parts.append(Part(operation, per_group))
    for out in operation.outs:
        if out is not None:
            plan.kinds[out] = kind


def _note_batched(plan: Plan, operation: Operation) -> None:
    plan.parts.append(Part(operation, per_group=True))
    recording = plan.recording
    sums = _SUMS.get(operation.op, frozenset())
    for place, out in enumerate(operation.outs):
        if out is None:
            continue
        if out in recording.batched or place in _OWN.get(operation.op, ()):
            plan.kinds[out] = "batched"
        elif place in sums:
            plan.kinds[out] = "partial"
        else:
            raise CannotCaptureError(f"{operation.op} mixes samples in a way that cannot be split")


def _takes_partial(operation: Operation, kinds: dict[int, str]) -> bool:
    """Tell whether an operation may be done to the parts of a sum one by one."""
    if operation.op is _aten.nll_loss_backward.default or operation.op in _OWN:
        return True  # the first is given a weight that it does not use, for losses are added up
    others = [kinds[value] for value in refs_in(operation)[1:]]
    if operation.op is _aten.add.Tensor:  # gradients of a weight that is used twice
        return others == ["partial"] and kinds[refs_in(operation)[0]] == "partial"
    return operation.op in _LINEAR and not others


# ---------------------------------------------------------------- what it is for


def _name_layers(plan: Plan) -> None:
    """Name each part after the weights it works with, or else after what it follows."""
    names = {value: name for name, value in plan.recording.parameters.items()}
    layer_of: dict[int, str] = {}
    for part in plan.parts:
        read = refs_in(part.operation) + all_in(part.operation)
        weights = [names[value] for value in read if value in names]
        inherited = [layer_of[value] for value in read if value in layer_of]
        part.layer = weights[0].rsplit(".", 1)[0] if weights else (inherited or [""])[0]
        for out in part.operation.outs:
            if out is not None:
                layer_of[out] = part.layer


def _mark(plan: Plan) -> None:
    """Say what each part is for, and which of them nobody but an update waits for."""
    recording = plan.recording
    behind = recording.pulls  # what depends on the pull from behind is backward
    readers: Counter[int] = Counter()
    side_readers: Counter[int] = Counter()
    for part in plan.parts:
        read = refs_in(part.operation) + all_in(part.operation)
        backward = any(value in behind for value in read)
        if backward:
            behind.update(out for out in part.operation.outs if out is not None)
        part.kind = "error" if backward else "forward"
        if not part.per_group:
            part.kind = "combine" if all_in(part.operation) else part.kind
        readers.update(set(read))
    for part in reversed(plan.parts):
        outs = [out for out in part.operation.outs if out is not None]
        partial = all(plan.kinds[out] == "partial" for out in outs)
        norm = part.operation.op in _FOR_NORMS
        is_view = any(r.alias_info is not None for r in part.operation.op._schema.returns)
        only_side = all(readers[out] == side_readers[out] for out in outs)
        part.side = (
            part.per_group
            and part.kind == "error"
            and not norm
            and only_side
            and (partial or (is_view and any(readers[out] for out in outs)))
        )
        if part.side:
            part.kind = "gradient"
            side_readers.update(set(refs_in(part.operation)))
