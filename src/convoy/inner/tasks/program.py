"""A step written out for groups of samples: instructions, the tasks they form, who waits for whom.

Instructions follow each other as in the plan, so that every one finds its inputs made. Tasks are
stretches of them that nothing has to come between:

    group 1   conv, sums |        | norm, relu, conv, sums |        | ...   | error | ...
    group 2   conv, sums |        | norm, relu, conv, sums |        | ...   | error | ...
    once                 | totals |                        | totals |
    side                                                              gradient 1, 2 -> sum, update

Whoever reads a value waits for its maker; whoever changes one in place waits for all that read
it before. So a layer's update starts when its gradient is complete and its weights are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from convoy.inner.tasks.capture import Operation, Ref, Size, map_refs
from convoy.inner.tasks.decompose import All, Counts, Kind, Part, Plan
from convoy.inner.tasks.norms import OPS

_aten = torch.ops.aten
_BUCKET = 1 << 14  # weights that are at least updated together
_SLICE = 1 << 18  # weights that are at most updated by one task


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor."""

    number: int


@dataclass(eq=False, slots=True)
class Instruction:
    """A call with everything settled but the tensors.

    Attributes:
        part: the number of the plan's part it comes from: what is alike costs alike.
        group: the samples it works on; -1: all, or none.
        reads, writes: places; what it changes in place is in both.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    part: int
    group: int
    kind: Kind
    layer: str
    side: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sgd:
    """How weights are moved."""

    momentum: float
    nesterov: bool
    weight_decay: float


@dataclass(eq=False, slots=True)
class Program:
    """Instructions, and the places of what goes in and comes out.

    Attributes:
        inputs: places by name: "images", "labels", "keys", "scale", "rate", each parameter as
            "p:NAME", its gradient as "g:NAME", its momentum as "m:NAME", each buffer as "b:NAME".
        loss, logits: places of the results.
    """

    sizes: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    loss: int = -1
    logits: int = -1
    num_slots: int = 0


def write_program(plan: Plan, sizes: Sequence[int], sgd: Sgd | None) -> Program:
    """Write a step out for groups of these sizes, with the update of the weights or without."""
    return _Writer(plan, tuple(sizes), sgd).write()


class _Writer:
    """Writes one program."""

    def __init__(self, plan: Plan, sizes: tuple[int, ...], sgd: Sgd | None) -> None:
        self._plan, self._sizes, self._sgd = plan, sizes, sgd
        self._program = Program(sizes)
        self._slots: dict[tuple[int, int], int] = {}  # (value, group) -> place
        self._shapes = {
            name: plan.recording.shapes[value] for name, value in plan.recording.parameters.items()
        }

    def write(self) -> Program:
        """Write inputs, the plan's parts, then what becomes of the results."""
        self._place_inputs()
        for number, part in enumerate(self._plan.parts):
            if part.per_group:
                for group in range(len(self._sizes)):
                    self._emit(number, part, group)
            else:
                self._emit(number, part, -1)
        self._collect()
        self._update()
        self._copy_buffers()
        return self._program

    # ------------------------------------------------------------ places

    def _new(self) -> int:
        self._program.num_slots += 1
        return self._program.num_slots - 1

    def _input(self, name: str) -> int:
        inputs = self._program.inputs
        if name not in inputs:
            inputs[name] = self._new()
        return inputs[name]

    def _place_inputs(self) -> None:
        recording = self._plan.recording
        for name, value in recording.parameters.items():
            self._slots[value, -1] = self._input(f"p:{name}")
        for name, value in recording.buffers.items():
            self._slots[value, -1] = self._input(f"b:{name}")
        self._slots[recording.scale, -1] = self._input("scale")
        for name, value in (
            ("images", recording.images),
            ("labels", recording.labels),
            ("keys", recording.keys),
        ):
            whole = Slot(self._input(name))
            start = 0
            for group, size in enumerate(self._sizes):
                out = self._slots[value, group] = self._new()
                self._add(
                    _aten.narrow.default,
                    (whole, 0, start, size),
                    (out,),
                    -1,
                    group,
                    "forward",
                    name,
                )
                start += size

    def _slot(self, value: int, group: int) -> int:
        shared = self._plan.kinds[value] == "shared"
        return self._slots[value, -1 if shared else group]

    # ------------------------------------------------------------ instructions

    def _emit(self, number: int, part: Part, group: int) -> None:
        operation = part.operation
        args = self._settled(operation.args, group)
        kwargs = {key: self._settled(value, group) for key, value in operation.kwargs.items()}
        outs = tuple(None if out is None else self._out(out, group) for out in operation.outs)
        self._add(operation.op, args, outs, number, group, part.kind, part.layer, part.side, kwargs)

    def _out(self, value: int, group: int) -> int:
        place = self._new()
        self._slots[value, group] = place
        return place

    def _settled(self, item: Any, group: int) -> Any:
        """Return an argument with places for values and numbers for sizes."""
        if isinstance(item, Counts):
            counts = [size * item.places for size in self._sizes]
            return {"each": counts, "all": sum(counts), "own": counts[group]}[item.of]
        if isinstance(item, list) and item and isinstance(item[0], All):
            return [Slot(self._slots[item[0].value, g]) for g in range(len(self._sizes))]
        if isinstance(item, (list, tuple)):
            return type(item)(self._settled(part, group) for part in item)
        if isinstance(item, Ref):
            return Slot(self._slot(item.value, group))
        if isinstance(item, Size):
            return item.at(self._sizes[group] if group >= 0 else sum(self._sizes))
        return item

    def _add(
        self,
        op: Any,
        args: tuple[Any, ...],
        outs: tuple[int | None, ...],
        part: int,
        group: int,
        kind: Kind,
        layer: str,
        side: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        reads = tuple(slots_in((args, tuple((kwargs or {}).values()))))
        changed = [
            slot
            for argument, value in zip(op._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for slot in slots_in(value)
        ]
        writes = (*(out for out in outs if out is not None), *changed)
        self._program.instructions.append(
            Instruction(op, args, kwargs or {}, outs, part, group, kind, layer, side, reads, writes)
        )

    # ------------------------------------------------------------ results

    def _collect(self) -> None:
        """Add up the loss, and put the groups' logits behind each other."""
        recording, program = self._plan.recording, self._program
        groups = range(len(self._sizes))
        program.loss = self._input("loss")
        losses = [Slot(self._slots[recording.loss, g]) for g in groups]
        self._once(OPS.sum_parts.default, (Slot(program.loss), losses), "loss")
        program.logits = self._new()
        logits = [Slot(self._slots[recording.logits, g]) for g in groups]
        self._once(_aten.cat.default, (logits, 0), "logits", program.logits)

    def _once(
        self,
        op: Any,
        args: tuple[Any, ...],
        layer: str,
        out: int | None = None,
        kind: Kind = "combine",
    ) -> None:
        outs = () if out is None else (out,)
        self._add(op, args, outs, -1, -1, kind, layer)

    def _update(self) -> None:
        """Add up each gradient and move the weights, in handy portions."""
        bucket: list[str] = []
        for name in reversed(self._plan.recording.parameters):
            numbers = torch.Size(self._shapes[name]).numel()
            if numbers > _SLICE:
                self._update_slices(name, numbers)
                continue
            self._add_up(name, Slot(self._input(f"g:{name}")), None)
            bucket.append(name)
            if sum(torch.Size(self._shapes[n]).numel() for n in bucket) >= _BUCKET:
                self._move_bucket(bucket)
                bucket = []
        if bucket:
            self._move_bucket(bucket)

    def _parts_of(self, name: str) -> list[Slot]:
        value = self._plan.recording.gradients[name]
        if self._plan.kinds[value] == "shared":
            return [Slot(self._slots[value, -1])]
        return [Slot(self._slots[value, g]) for g in range(len(self._sizes))]

    def _add_up(self, name: str, out: Slot, rows: tuple[int, int] | None) -> None:
        parts = self._parts_of(name)
        if rows is not None:
            parts = [Slot(self._narrowed(part, rows, name)) for part in parts]
        self._once(OPS.sum_parts.default, (out, parts), name, kind="update")

    def _narrowed(self, source: Slot, rows: tuple[int, int], name: str) -> int:
        out = self._new()
        start, count = rows
        self._once(_aten.narrow.default, (source, 0, start, count), name, out, "update")
        return out

    def _update_slices(self, name: str, numbers: int) -> None:
        """Do a large weight in several tasks: each takes some of its rows."""
        length = self._shapes[name][0]
        pieces = min(length, -(-numbers // _SLICE))
        for piece in range(pieces):
            start, stop = length * piece // pieces, length * (piece + 1) // pieces
            rows = (start, stop - start)
            taken = {
                kind: self._narrowed(Slot(self._input(f"{kind}:{name}")), rows, name)
                for kind in ("g", *self._moved)
            }
            self._add_up(name, Slot(taken["g"]), rows)
            self._move({kind: [place] for kind, place in taken.items()}, name)

    @property
    def _moved(self) -> tuple[str, ...]:
        """Return what an update changes: weights, and momentum if there is any."""
        if self._sgd is None:
            return ()
        return ("p", "m") if self._sgd.momentum else ("p",)

    def _move_bucket(self, names: list[str]) -> None:
        kinds = ("g", *self._moved)
        self._move({k: [self._input(f"{k}:{name}") for name in names] for k in kinds}, names[0])

    def _move(self, places: dict[str, list[int]], name: str) -> None:
        """Move weights, given the places of weights, gradients and momentum."""
        sgd = self._sgd
        if sgd is None:
            return
        lists = [[Slot(place) for place in places.get(kind, ())] for kind in ("p", "g", "m")]
        rate = Slot(self._input("rate"))
        self._add(
            _aten._fused_sgd_.tensor_lr,
            tuple(lists),
            (),
            -1,
            -1,
            "update",
            name,
            kwargs={
                "weight_decay": sgd.weight_decay,
                "momentum": sgd.momentum,
                "lr": rate,
                "dampening": 0.0,
                "nesterov": sgd.nesterov,
                "maximize": False,
                "is_first_step": False,
                "grad_scale": None,
                "found_inf": None,
            },
        )

    def _copy_buffers(self) -> None:
        plan = self._plan
        made_by = {o: p.operation for p in plan.parts for o in p.operation.outs if o is not None}
        for name, value in plan.recording.new_buffers.items():
            old = plan.recording.buffers[name]
            if name in plan.updated or _is_copy(made_by.get(value), old):
                continue
            args = (Slot(self._input(f"b:{name}")), Slot(self._slots[value, -1]), False)
            self._once(_aten.copy_.default, args, name, kind="update")


def _is_copy(operation: Operation | None, of: int) -> bool:
    return (
        operation is not None
        and operation.op is _aten.clone.default
        and operation.args[0] == Ref(of)
    )


def slots_in(item: Any) -> list[int]:
    """Return the places named in an argument."""
    if isinstance(item, Slot):
        return [item.number]
    if isinstance(item, (list, tuple)):
        return [number for part in item for number in slots_in(part)]
    return []


__all__ = ["Instruction", "Program", "Sgd", "Slot", "map_refs", "slots_in", "write_program"]
