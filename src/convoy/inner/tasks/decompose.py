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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from convoy.inner.tasks.capture import CannotCaptureError, Operation, Recording, Ref, refs_in
from convoy.inner.tasks.norms import OPS

Kind = Literal["forward", "error", "gradient", "combine", "update"]
_aten = torch.ops.aten

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
    OPS.norm_parts.default: frozenset({0}),
    OPS.norm_back_parts.default: frozenset({0}),
    OPS.norm_back_total.default: frozenset({1, 2}),
}
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
_NORM_FORWARD = frozenset({_aten.native_batch_norm.default})
_NORM_BACKWARD = frozenset({_aten.native_batch_norm_backward.default})


@dataclass(frozen=True, slots=True)
class All:
    """The parts of a value, one from each group."""

    value: int


@dataclass(frozen=True, slots=True)
class Counts:
    """How many numbers of a channel there are: samples times `places`.

    Of "each" group as a list, of "all" together, or of the group that asks for its "own".
    """

    places: int
    of: Literal["each", "all", "own"]


@dataclass(eq=False, slots=True)
class Part:
    """An operation, and how it is done.

    Attributes:
        per_group: once for each group of samples; otherwise once.
        kind: what it is for.
        side: it leads to gradients of weights only, so that nothing else waits for it.
        layer: whose weights it works with, for people.
        wide: the whole batch at once, but only some neurons at a time: for a layer with so many
            weights that each group had better not read all of them ("forward", "error" or
            "gradient").
    """

    operation: Operation
    per_group: bool
    kind: Kind = "forward"
    side: bool = False
    layer: str = ""
    wide: Literal["", "forward", "error", "gradient"] = ""


@dataclass(eq=False, slots=True)
class Plan:
    """A step, ready to be written out for groups of any size.

    Attributes:
        parts: in an order that works.
        kinds: of each value: "shared", "batched" or "partial".
        recording: where it comes from.
        updated: buffers that a part changes in place; the others are copied at the end.
        rows: of each weight whose gradient is made some rows at a time, the value that it is
            made of: a product, which may be rounded afterwards.
    """

    parts: list[Part]
    kinds: dict[int, str]
    recording: Recording
    updated: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)


def decompose(recording: Recording, *, norms: Literal["batch", "group"] = "batch") -> Plan:
    """Sort a step into what each group does and what is done once.

    Args:
        recording: the step.
        norms: batch-norm's statistics are those of the whole batch, or each group's own.

    Raises:
        CannotCaptureError: an operation makes something else than a sum of many samples.
    """
    lowered, updated = _Lowering(recording, norms).run()
    plan = Plan([], {}, recording, updated)
    _classify(plan, lowered)
    _name_layers(plan)
    _mark(plan)
    _widen(plan)
    return plan


# ---------------------------------------------------------------- batch-norm, convolutions


class _Lowering:
    """Replaces batch-norms and splits backward convolutions."""

    def __init__(self, recording: Recording, norms: str) -> None:
        self._recording = recording
        self._exact = norms == "batch"
        self._users = _users(recording)
        self._totals: dict[int, int] = {}  # a norm's statistics, by the mean it used to give
        self._done: list[Operation] = []
        self._updated: set[str] = set()
        self._rectified: dict[int, int] = {}  # output of a norm -> of the relu made part of it
        self._plus: dict[int, Ref] = {}  # output of a norm -> the shortcut that is added to it
        self._late: dict[int, Operation] = {}  # norms that are done where their rectifier was
        self._gone: set[int] = set()  # values that are no longer made
        self._behind: dict[int, tuple[int, int]] = {}  # threshold_backward: its inputs

    def run(self) -> tuple[list[Operation], set[str]]:
        """Return the operations that take the place of the recorded ones."""
        operations = self._recording.operations
        self._fuse_rectifiers(operations)
        for operation in operations:
            if operation.op in _NORM_FORWARD:
                self._norm_forward(operation)
            elif operation.op in _NORM_BACKWARD:
                self._norm_backward(operation)
            elif operation.op is _aten.convolution_backward.default:
                self._split_convolution(operation)
            elif operation.outs[0] in self._late:
                self._done.append(self._late[operation.outs[0]])
            elif operation.outs[0] not in self._gone:
                self._done.append(operation)
        return _used(self._done, self._recording, self._updated), self._updated

    def _new(self) -> int:
        self._recording.num_values += 1
        return self._recording.num_values - 1

    def _fuse_rectifiers(self, operations: list[Operation]) -> None:
        """Find rectifiers behind a norm, and what they let through on the way back.

        Between the two there may be the sum with a shortcut, as in a residual block.
        """
        made_by = {out: op for op in operations for out in op.outs if out is not None}
        for operation in operations:
            if operation.op is _aten.relu.default:
                self._fuse_forward(operation, made_by)
            if operation.op is _aten.threshold_backward.default and operation.args[2] == 0:
                dy, y, out = operation.args[0], operation.args[1], operation.outs[0]
                assert out is not None
                users = self._users[out]
                only_norm = len(users) == 1 and users[0].op in _NORM_BACKWARD
                if only_norm and y.value in self._rectified.values():
                    self._behind[out] = (dy.value, y.value)
                    self._gone.add(out)

    def _fuse_forward(self, relu: Operation, made_by: dict[int, Operation]) -> None:
        before, after = relu.args[0].value, relu.outs[0]
        assert after is not None
        if len(self._users[before]) != 1 or before not in made_by:
            return
        maker = made_by[before]
        if maker.op in _NORM_FORWARD:
            self._rectified[before] = after
        elif maker.op is _aten.add.Tensor and not maker.kwargs and len(maker.args) == 2:
            for norm, other in (maker.args, maker.args[::-1]):
                if (
                    isinstance(norm, Ref)
                    and isinstance(other, Ref)
                    and norm != other
                    and self._is_free(norm, made_by)
                ):
                    self._rectified[norm.value] = after
                    self._plus[norm.value] = other
                    self._gone.add(before)
                    break

    def _is_free(self, value: Ref, made_by: dict[int, Operation]) -> bool:
        """Tell whether a value is what a norm gives, asked for once, and not yet taken."""
        maker = made_by.get(value.value)

        def alike(item: Ref) -> tuple[object, ...]:
            return self._recording.shapes[item.value], self._recording.types[item.value]

        return (
            maker is not None
            and maker.op in _NORM_FORWARD
            and len(self._users[value.value]) == 1
            and value.value not in self._rectified
            and all(alike(a) == alike(value) for a in refs_of_sum(self._users, value))
        )

    def _norm_forward(self, operation: Operation) -> None:
        x, weight, bias, mean, var, training, momentum, eps = operation.args
        if not training:
            self._done.append(operation)
            return
        y, old_mean, old_scale = operation.outs
        assert y is not None
        parts, total = self._new(), self._new()
        places = self._places(x.value)
        held = [self._buffer_behind(item) for item in (mean, var)]
        out = self._rectified.get(y, y)
        every = ([All(parts)], Counts(places, "each"), *held, momentum, eps)
        own = ([Ref(parts)], [Counts(places, "own")], None, None, momentum, eps)
        self._done.append(Operation(OPS.norm_parts.default, (x,), {}, (parts,)))
        if not self._exact:  # the running statistics are those of the whole batch all the same
            self._done.append(Operation(OPS.norm_total.default, every, {}, (self._new(),)))
        args = every if self._exact else own
        self._done.append(Operation(OPS.norm_total.default, args, {}, (total,)))
        args = (x, Ref(total), weight, bias, self._plus.get(y), y != out)
        apply = Operation(OPS.norm_apply.default, args, {}, (out,))
        if out == y:
            self._done.append(apply)
        else:
            self._late[out] = apply
        for value in (old_mean, old_scale):
            if value is not None:
                self._totals[value] = total

    def _norm_backward(self, operation: Operation) -> None:
        dy, x, weight, _, _, mean, _, training, _, _ = operation.args
        if not training or mean.value not in self._totals:
            raise CannotCaptureError("a batch-norm learns without its own statistics")
        total = Ref(self._totals[mean.value])
        y: Ref | None = None
        if dy.value in self._behind:
            dy, y = (Ref(value) for value in self._behind[dy.value])
        dx, d_weight, d_bias = operation.outs
        parts, sums = self._new(), self._new()
        like = weight if weight is not None else total  # not x: all groups' sums are added once
        count = Counts(self._places(x.value), "all" if self._exact else "own")
        those = [All(parts) if self._exact else Ref(parts)]
        self._done += [
            Operation(OPS.norm_back_parts.default, (dy, x, total, y), {}, (parts,)),
            Operation(
                OPS.norm_back_total.default,
                (those, total, like),
                {},
                (sums, d_weight, d_bias),
            ),
        ]
        if dx is not None:
            args = (dy, x, total, Ref(sums), weight, count, y)
            self._done.append(Operation(OPS.norm_back_apply.default, args, {}, (dx,)))

    def _places(self, x: int) -> int:
        shape = self._recording.shapes[x]
        if self._recording.batched.get(x) != 0:
            raise CannotCaptureError("a batch-norm's input has no samples in its first dimension")
        return int(torch.Size(shape[2:]).numel())

    def _buffer_behind(self, item: Any) -> Any:
        """Return the buffer that was copied for the trace; it is now changed in place."""
        if item is None:
            return None
        recording = self._recording
        made_by = {out: op for op in recording.operations for out in op.outs if out is not None}
        source = refs_in(made_by[item.value])[0] if item.value in made_by else item.value
        names = {value: name for name, value in recording.buffers.items()}
        if source not in names:
            raise CannotCaptureError("a batch-norm keeps its statistics in no buffer")
        self._updated.add(names[source])
        return Ref(source)

    def _split_convolution(self, operation: Operation) -> None:
        """Ask for the error and for the gradients apart: only the first is waited for."""
        *rest, (error, weight, bias) = operation.args
        dx, dw, db = operation.outs
        if error and dx is not None:
            args = (*rest, [True, False, False])
            self._done.append(Operation(operation.op, args, {}, (dx, None, None)))
        if dw is not None or db is not None:
            args = (*rest, [False, weight, bias])
            self._done.append(Operation(operation.op, args, {}, (None, dw, db)))


def _users(recording: Recording) -> dict[int, list[Operation]]:
    found: dict[int, list[Operation]] = {value: [] for value in range(recording.num_values)}
    for operation in recording.operations:
        for value in set(refs_in(operation)):
            found[value].append(operation)
    return found


def refs_of_sum(users: dict[int, list[Operation]], value: Ref) -> list[Ref]:
    """Return what the only user of a value adds up."""
    return [argument for argument in users[value.value][0].args if isinstance(argument, Ref)]


def all_in(operation: Operation) -> list[int]:
    """Return the values of which an operation takes all groups' parts."""
    return [
        item.value
        for argument in operation.args
        if isinstance(argument, list)
        for item in argument
        if isinstance(item, All)
    ]


def _used(
    operations: list[Operation], recording: Recording, updated: Iterable[str]
) -> list[Operation]:
    """Leave out what nobody asks for any more."""
    wanted = {recording.loss, recording.logits, *recording.gradients.values()}
    wanted |= {v for name, v in recording.new_buffers.items() if name not in updated}
    kept = []
    for operation in reversed(operations):
        if operation.op._schema.is_mutable or any(out in wanted for out in operation.outs):
            wanted.update(refs_in(operation), all_in(operation))
            kept.append(operation)
    return kept[::-1]


# ---------------------------------------------------------------- kinds of values


def _classify(plan: Plan, operations: list[Operation]) -> None:
    recording, kinds = plan.recording, plan.kinds
    for value in (*recording.parameters.values(), *recording.buffers.values(), recording.scale):
        kinds[value] = "shared"
    for value in (recording.images, recording.labels, recording.keys):
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
    behind = {recording.scale}  # what depends on the pull from behind is backward
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
        norm = part.operation.op in (OPS.norm_parts.default, OPS.norm_back_parts.default)
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


# ---------------------------------------------------------------- large layers

WIDE = 1 << 20  # weights of a fully connected layer from which on it is cut by neurons


def _widen(plan: Plan) -> None:
    """Find fully connected layers that hold more weights than all groups had better read."""
    recording = plan.recording
    made_by = {out: p for p in plan.parts for out in p.operation.outs if out is not None}
    for part in plan.parts:
        operation = part.operation
        if not part.per_group or operation.op not in (_aten.mm.default, _aten.addmm.default):
            continue
        left, right = (argument.value for argument in operation.args[-2:])
        weights = recording.shapes[right]
        if plan.kinds[right] == "shared" and plan.kinds[left] == "batched":
            if torch.Size(weights).numel() >= WIDE:
                part.wide = "forward" if operation.op is _aten.addmm.default else "error"
        elif part.side and operation.op is _aten.mm.default:
            out = operation.outs[0]
            assert out is not None
            big = torch.Size(recording.shapes[out]).numel() >= WIDE
            name = _whose_gradient(plan, out, made_by) if big else None
            if name is not None and recording.batched.get(left) == 1:
                part.wide = "gradient"
                plan.rows[name] = out
    _drop_chains(plan, made_by)


def _whose_gradient(plan: Plan, product: int, made_by: dict[int, Part]) -> str | None:
    """Return the weight whose gradient a product is, turned an even number of times at most."""
    for name, value in plan.recording.gradients.items():
        turns = 0
        while value != product and value in made_by:
            operation = made_by[value].operation
            if operation.op not in (_aten.t.default, _aten._to_copy.default, _aten.detach.default):
                break
            turns += operation.op is _aten.t.default
            value = operation.args[0].value
        if value == product:
            return name if turns % 2 == 0 else None
    return None


def _drop_chains(plan: Plan, made_by: dict[int, Part]) -> None:
    """Leave out what would have been done to a gradient that is now made row by row."""
    gone = set()
    for name, product in plan.rows.items():
        value = plan.recording.gradients[name]
        while value != product:
            gone.add(id(made_by[value]))
            value = made_by[value].operation.args[0].value
    plan.parts = [part for part in plan.parts if id(part) not in gone]
