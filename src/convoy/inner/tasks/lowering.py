"""A recorded step with batch-norms that work by groups, and backward convolutions in two parts.

A batch-norm becomes what each group adds to its statistics, their total, and what all of it makes
of each group (norms.py); a rectifier behind it, or a residual sum and a rectifier, becomes part of
it. A backward convolution is asked for its error and for its gradients apart. Convolutions that we
do better than PyTorch become our own (convolutions.py), and count for a norm behind them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from convoy.inner.tasks.capture import CannotCaptureError
from convoy.inner.tasks.convolutions import (
    READ_THROUGH,
    Convolutions,
    Hands,
    Normed,
    pools_suit,
    way_of,
)
from convoy.inner.tasks.norms import OPS
from convoy.inner.tasks.recording import Operation, Recording, Ref, refs_in

_aten = torch.ops.aten
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


class Lowering:
    """Replaces batch-norms and splits backward convolutions.

    Args:
        recording: the step.
        norms: whose statistics a batch-norm uses: of the whole "batch", or of each "group".
        hands: what the processor can do for our own convolutions.
    """

    def __init__(self, recording: Recording, norms: str, hands: Hands) -> None:
        self._recording, self._hands = recording, hands
        self._convolutions = Convolutions(recording, hands, self._new)
        self._exact = norms == "batch"
        self._users = _users(recording)
        self._made_by = {o: op for op in recording.operations for o in op.outs if o is not None}
        self._totals: dict[int, int] = {}  # a norm's statistics, by the mean it used to give
        self._done: list[Operation] = []
        self._updated: set[str] = set()
        self._rectified: dict[int, int] = {}  # output of a norm -> of the relu made part of it
        self._plus: dict[int, Ref] = {}  # output of a norm -> the shortcut that is added to it
        self._late: dict[int, Operation] = {}  # norms that are done where their rectifier was
        self._gone: set[int] = set()  # values that are no longer made
        self._behind: dict[int, tuple[int, int]] = {}  # threshold_backward: its inputs
        self._unmade: set[int] = set()  # what only convolutions ask for, who make it themselves
        self._through: dict[int, int] = {}  # their error -> what gets through the rectifier
        self._pools: set[int] = set()  # where our own max-pools keep who won
        self._counted: dict[int, int] = {}  # a convolution's output -> what it adds to a norm
        self._returning: dict[int, Operation] = {}  # what flows back to a norm and to others
        self._returned: dict[int, int] = {}  # what flows back to a norm -> what that adds to it

    def run(self) -> tuple[list[Operation], set[str]]:
        """Return the operations that take the place of the recorded ones."""
        operations = self._recording.operations
        self._fuse_rectifiers(operations)
        self._leave_to_convolutions()
        lower = {
            **dict.fromkeys(_NORM_FORWARD, self._norm_forward),
            **dict.fromkeys(_NORM_BACKWARD, self._norm_backward),
            _aten.convolution.default: self._convolution,
            _aten.convolution_backward.default: self._split_convolution,
            _aten.max_pool2d_with_indices.default: self._pool,
            _aten.max_pool2d_with_indices_backward.default: self._pool_backward,
            _aten.threshold_backward.default: self._rectifier_backward,
        }
        for operation in operations:
            lower.get(operation.op, self._keep)(operation)
        return _used(self._done, self._recording, self._updated), self._updated

    def _keep(self, operation: Operation) -> None:
        """Take an operation over as it is, unless it has become part of another."""
        out = operation.outs[0]
        if out in self._late:
            self._done.append(self._late[out])
        elif out not in self._gone:
            self._done.append(operation)

    def _new(self) -> int:
        self._recording.num_values += 1
        return self._recording.num_values - 1

    def _fuse_rectifiers(self, operations: list[Operation]) -> None:
        """Find rectifiers behind a norm, and what they let through on the way back.

        Between the two there may be the sum with a shortcut, as in a residual block.
        """
        for operation in operations:
            if operation.op is _aten.relu.default:
                self._fuse_forward(operation)
            if operation.op is _aten.threshold_backward.default and operation.args[2] == 0:
                dy, y, out = operation.args[0], operation.args[1], operation.outs[0]
                assert out is not None
                norms = [user for user in self._users[out] if user.op in _NORM_BACKWARD]
                if len(norms) != 1 or y.value not in self._rectified.values():
                    continue
                if len(self._users[out]) == 1:
                    self._behind[out] = (dy.value, y.value)
                    self._gone.add(out)
                elif norms[0].args[0] == Ref(out):
                    self._returning[out] = norms[0]
                    self._gone.update(self._sum_before(dy))

    def _fuse_forward(self, relu: Operation) -> None:
        made_by = self._made_by
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
                    and self._is_free(norm)
                ):
                    self._rectified[norm.value] = after
                    self._plus[norm.value] = other
                    self._gone.add(before)
                    break

    def _leave_to_convolutions(self) -> None:
        """Find what norms and rectifiers make for one convolution only that can make it itself.

        On the way back its error must go to the rectifier alone.
        """
        for norm, after in self._rectified.items():
            if norm in self._plus or self._made_by[norm].args[5] is not True:
                continue
            users = self._users[after]
            back = [u for u in users if u.op is _aten.convolution_backward.default]
            forth = [u for u in users if u.op is _aten.convolution.default]
            cuts = [u for u in users if u.op is _aten.threshold_backward.default]
            if not (len(back) == len(forth) == len(cuts) == 1 and len(users) == 3):
                continue
            (way_back,), (way_forth,), (cut,) = back, forth, cuts
            error, flow = way_back.outs[0], cut.outs[0]
            if (
                flow in self._behind
                and error is not None
                and self._users[error] == [cut]
                and way_forth.args[0] == way_back.args[1] == Ref(after)
                and all(self._reads_through(op) for op in (way_back, way_forth))
                and self._learns_in_fp32(self._made_by[norm])
            ):
                self._unmade.add(after)
                self._gone.add(after)
                del self._behind[flow]
                self._through[error] = flow

    def _reads_through(self, convolution: Operation) -> bool:
        return way_of(self._recording, convolution, self._hands) in READ_THROUGH

    def _learns_in_fp32(self, norm: Operation) -> bool:
        given = [item for item in norm.args[1:3] if item is not None]
        return all(self._recording.types[item.value] == torch.float32 for item in given)

    def _is_free(self, value: Ref) -> bool:
        """Tell whether a value is what a norm gives, asked for once, and not yet taken."""
        maker = self._made_by.get(value.value)

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
        total, places = self._new(), self._places(x.value)
        parts = self._counted.get(x.value)
        if parts is None:
            parts = self._new()
            self._done.append(Operation(OPS.norm_parts.default, (x,), {}, (parts,)))
        held = [self._buffer_behind(item) for item in (mean, var)]
        out = self._rectified.get(y, y)
        every = ([All(parts)], Counts(places, "each"), *held, momentum, eps)
        own = ([Ref(parts)], [Counts(places, "own")], None, None, momentum, eps)
        if not self._exact:  # the running statistics are those of the whole batch all the same
            self._done.append(Operation(OPS.norm_total.default, every, {}, (self._new(),)))
        args = every if self._exact else own
        self._done.append(Operation(OPS.norm_total.default, args, {}, (total,)))
        args = (x, Ref(total), weight, bias, self._plus.get(y), y != out)
        apply = Operation(OPS.norm_apply.default, args, {}, (out,))
        if out in self._unmade:
            self._convolutions.normed[out] = Normed(x, Ref(total), weight, bias)
        elif out == y:
            self._done.append(apply)
        else:
            self._late[out] = apply
        for value in (old_mean, old_scale):
            if value is not None:
                self._totals[value] = total

    def _sum_before(self, dy: Ref) -> list[int]:
        """Return a sum of two that nobody else asks for: a rectifier adds it up by itself."""
        maker = self._made_by.get(dy.value)
        if maker is None or maker.op is not _aten.add.Tensor or maker.kwargs:
            return []
        plain = len(maker.args) == 2 and all(
            isinstance(item, Ref)
            and self._recording.shapes[item.value] == self._recording.shapes[dy.value]
            and self._recording.types[item.value] == self._recording.types[dy.value]
            for item in maker.args
        )
        return [dy.value] if plain and len(self._users[dy.value]) == 1 else []

    def _rectifier_backward(self, operation: Operation) -> None:
        """Let a rectifier behind a norm and a shortcut count for the norm."""
        dy, y, _ = operation.args
        out = operation.outs[0]
        assert out is not None
        norm = self._returning.get(out)
        if norm is None or norm.args[5].value not in self._totals:
            self._keep(operation)
            return
        more = None
        if dy.value in self._gone:
            dy, more = self._made_by[dy.value].args
        parts = self._returned[out] = self._new()
        args = (dy, more, y, norm.args[1], Ref(self._totals[norm.args[5].value]))
        self._done.append(Operation(OPS.rectified_parts.default, args, {}, (out, parts)))

    def _norm_backward(self, operation: Operation) -> None:
        dy, x, weight, _, _, mean, _, training, _, _ = operation.args
        if not training or mean.value not in self._totals:
            raise CannotCaptureError("a batch-norm learns without its own statistics")
        total = Ref(self._totals[mean.value])
        y: Ref | None = None
        if dy.value in self._behind:
            dy, y = (Ref(value) for value in self._behind[dy.value])
        dx, d_weight, d_bias = operation.outs
        sums = self._new()
        parts = self._returned.get(dy.value)
        if parts is None:
            parts = self._new()
            asked = (dy, x, total, y)
            self._done.append(Operation(OPS.norm_back_parts.default, asked, {}, (parts,)))
        like = weight if weight is not None else total  # not x: all groups' sums are added once
        count = Counts(self._places(x.value), "all" if self._exact else "own")
        those = [All(parts) if self._exact else Ref(parts)]
        outs = (sums, d_weight, d_bias)
        self._done.append(Operation(OPS.norm_back_total.default, (those, total, like), {}, outs))
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
        recording, made_by = self._recording, self._made_by
        source = refs_in(made_by[item.value])[0] if item.value in made_by else item.value
        names = {value: name for name, value in recording.buffers.items()}
        if source not in names:
            raise CannotCaptureError("a batch-norm keeps its statistics in no buffer")
        self._updated.add(names[source])
        return Ref(source)

    def _convolution(self, operation: Operation) -> None:
        (y,) = operation.outs
        assert y is not None
        if not way_of(self._recording, operation, self._hands):
            self._done.append(operation)
            return
        if any(user.op in _NORM_FORWARD and user.args[5] for user in self._users[y]):
            self._counted[y] = self._new()
        self._done += self._convolutions.forward(operation, self._counted.get(y))

    def _pool(self, operation: Operation) -> None:
        y, places = operation.outs
        users = [] if places is None else self._users[places]
        if pools_suit(self._recording, operation, users, self._hands.lanes):
            self._pools.add(places if places is not None else -1)
            operation = Operation(OPS.max_pool.default, operation.args[:2], {}, (y, places))
        self._done.append(operation)

    def _pool_backward(self, operation: Operation) -> None:
        dy, x, size, *_, places = operation.args
        if places.value in self._pools:
            args = (dy, places, x, size)
            operation = Operation(OPS.max_pool_back.default, args, {}, operation.outs)
        self._done.append(operation)

    def _split_convolution(self, operation: Operation) -> None:
        """Ask for the error and for the gradients apart: only the first is waited for."""
        *rest, (error, weight, bias) = operation.args
        dx, dw, db = operation.outs
        ours = bool(way_of(self._recording, operation, self._hands))
        if error and dx is not None:
            if dx in self._through:
                flow, parts = self._through[dx], self._new()
                self._returned[flow] = parts
                self._done += self._convolutions.error(operation, (flow, parts))
            elif ours:
                self._done += self._convolutions.error(operation)
            else:
                args = (*rest, [True, False, False])
                self._done.append(Operation(operation.op, args, {}, (dx, None, None)))
        if ours:
            self._done += self._convolutions.gradients(operation)
        elif dw is not None or db is not None:
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
    wanted = recording.asked
    wanted |= {v for name, v in recording.new_buffers.items() if name not in updated}
    kept = []
    for operation in reversed(operations):
        if operation.op._schema.is_mutable or any(out in wanted for out in operation.outs):
            wanted.update(refs_in(operation), all_in(operation))
            kept.append(operation)
    return kept[::-1]
