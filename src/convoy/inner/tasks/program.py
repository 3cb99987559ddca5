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
from typing import Any

import torch

from convoy.inner.tasks.bundles import bundles_of
from convoy.inner.tasks.instructions import Instruction, Program, Sgd, Slot, slots_in
from convoy.inner.tasks.lowering import All, Counts
from convoy.inner.tasks.norms import OPS
from convoy.inner.tasks.plan import Kind, Part, Plan, even_ranges
from convoy.inner.tasks.recording import Operation, Ref, Size, refs_in

_aten = torch.ops.aten
_ADDED = 1 << 17  # numbers that one task adds up at most, where each group has found some
_FEWEST = 1 << 11  # weights that are at least updated together
_TILE = 1 << 19  # weights of a large layer that one task works with
_ONCE = range(-1, 0)  # instead of groups


def write_program(plan: Plan, sizes: Sequence[int], sgd: Sgd | None) -> Program:
    """Write a step out for groups of these sizes, with the update of the weights or without."""
    return _Writer(plan, tuple(sizes), sgd).write()


class _Writer:
    """Writes one program."""

    def __init__(self, plan: Plan, sizes: tuple[int, ...], sgd: Sgd | None) -> None:
        self._plan, self._sizes, self._sgd = plan, sizes, sgd
        self._program = Program(sizes)
        self._slots: dict[tuple[int, int], int] = {}  # (value, group) -> place
        self._wholes: dict[int, int] = {}  # of values of all groups, put behind each other
        # Of sums that are found for several groups: for which, and the tile that does it.
        self._bundles: dict[int, dict[range, int]] = {}
        # Weights that are updated by one task. Others' sums are far away: many threads share them.
        self._slice = max(_FEWEST, _ADDED // len(sizes))
        self._tiles = 0
        self._tile = -1  # that instructions are written for
        self._shapes = {
            name: plan.recording.shapes[value] for name, value in plan.recording.parameters.items()
        }

    def write(self) -> Program:
        """Write inputs, the plan's parts, then what becomes of the results."""
        self._place_inputs()
        for number, part in enumerate(self._plan.parts):
            if part.wide:
                self._emit_wide(part)
            elif part.per_group:
                self._emit_bundles(number, part)
            else:
                self._emit(number, part, _ONCE)
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
        if recording.scale >= 0:
            self._slots[recording.scale, -1] = self._input("scale")
        for name in ("images", "labels", "keys", "flow"):
            value = getattr(recording, name)
            if value < 0:
                continue
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

    def _emit_bundles(self, number: int, part: Part) -> None:
        """Write a part for each group, or for several at once."""
        read = refs_in(part.operation)
        bundles = next((self._bundles[value] for value in read if value in self._bundles), None)
        if bundles is None:
            found = bundles_of(self._plan, part, self._sizes)
            bundles = {groups: self._new_tile() if len(groups) > 1 else -1 for groups in found}
        for groups, self._tile in bundles.items():
            self._emit(number, part, groups)
        self._tile = -1
        if len(bundles) < len(self._sizes):
            self._bundles |= {out: bundles for out in part.operation.outs if out is not None}

    def _emit(self, number: int, part: Part, groups: range) -> None:
        operation = part.operation
        args = self._settled(operation.args, groups, part)
        kwargs = {k: self._settled(value, groups, part) for k, value in operation.kwargs.items()}
        outs = tuple(None if out is None else self._out(out, groups) for out in operation.outs)
        group = groups[0] if len(groups) == 1 else -1
        self._add(operation.op, args, outs, number, group, part.kind, part.layer, part.side, kwargs)

    def _out(self, value: int, groups: range) -> int:
        place = self._new()
        self._slots |= dict.fromkeys(((value, group) for group in groups), place)
        return place

    def _settled(self, item: Any, groups: range, part: Part) -> Any:
        """Return an argument with places for values and numbers for sizes."""
        if isinstance(item, Counts):
            counts = [size * item.places for size in self._sizes]
            if sum(counts) == 1:  # as torch says it
                raise ValueError("Expected more than 1 value per channel when training")
            return {"each": counts, "all": sum(counts), "own": counts[groups[0]]}[item.of]
        if isinstance(item, list) and item and isinstance(item[0], All):
            return self._of_groups(item[0].value)
        if isinstance(item, (list, tuple)):
            return type(item)(self._settled(one, groups, part) for one in item)
        if isinstance(item, Ref):
            return Slot(self._joined(item.value, groups, part))
        if isinstance(item, Size):
            sizes = self._sizes if groups == _ONCE else self._sizes[groups.start : groups.stop]
            return item.at(sum(sizes))
        return item

    def _joined(self, value: int, groups: range, part: Part) -> int:
        """Return the place of a value of some groups, whose samples are put behind each other."""
        places = list(dict.fromkeys(self._slot(value, group) for group in groups))
        if len(places) == 1:
            return places[0]
        dim = self._plan.recording.batched[value]
        return self._wide(_aten.cat.default, ([Slot(place) for place in places], dim), part)

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
            Instruction(
                op,
                args,
                kwargs or {},
                outs,
                part,
                group,
                kind,
                layer,
                side,
                reads,
                writes,
                self._tile,
            )
        )

    # ------------------------------------------------------------ large layers

    def _emit_wide(self, part: Part) -> None:
        """Write a large layer's product for the whole batch, some of its neurons at a time."""
        if part.wide == "gradient":
            return  # it is made where the weights are updated, row by row
        *bias, rows, columns = (argument.value for argument in part.operation.args)
        whole = Slot(self._whole(rows, part))
        count = self._plan.recording.shapes[columns][1]
        numbers = torch.Size(self._plan.recording.shapes[columns]).numel()
        tiles = []
        for neurons in even_ranges(count, -(-numbers // _TILE)):
            start, length = neurons.start, len(neurons)
            self._begin_tile()
            some = self._cut_out(self._slot(columns, -1), 1, start, length, part)
            args: tuple[Any, ...] = (whole, Slot(some))
            if bias:
                args = (Slot(self._cut_out(self._slot(bias[0], -1), 0, start, length, part)), *args)
            tiles.append(Slot(self._wide(part.operation.op, args, part)))
        self._tile = -1
        out = part.operation.outs[0]
        assert out is not None
        together = self._wholes[out] = self._wide(_aten.cat.default, (tiles, 1), part)
        self._hand_out(out, together, part)

    def _hand_out(self, value: int, whole: int, part: Part) -> None:
        """Give each group its samples of a value."""
        start = 0
        for group, size in enumerate(self._sizes):
            place = self._out(value, range(group, group + 1))
            args = (Slot(whole), 0, start, size)
            self._add(_aten.narrow.default, args, (place,), -1, group, part.kind, part.layer)
            start += size

    def _whole(self, value: int, part: Part) -> int:
        """Return the place of a value of the whole batch."""
        if value not in self._wholes:
            parts = self._of_groups(value)
            dim = self._plan.recording.batched[value]
            self._wholes[value] = self._wide(_aten.cat.default, (parts, dim), part)
        return self._wholes[value]

    def _begin_tile(self) -> None:
        self._tile = self._new_tile()

    def _new_tile(self) -> int:
        self._tiles += 1
        return self._tiles - 1

    def _cut_out(self, place: int, dim: int, start: int, length: int, part: Part) -> int:
        return self._wide(_aten.narrow.default, (Slot(place), dim, start, length), part)

    def _wide(self, op: Any, args: tuple[Any, ...], part: Part) -> int:
        out = self._new()
        self._add(op, args, (out,), -1, -1, part.kind, part.layer)
        return out

    def _gradient_rows(self, name: str, rows: range) -> Slot:
        """Make some rows of a large layer's gradient, from the whole batch."""
        product = self._plan.rows[name]
        part = next(p for p in self._plan.parts if p.operation.outs == (product,))
        errors, inputs = (argument.value for argument in part.operation.args)
        wholes = [self._whole(value, part) for value in (errors, inputs)]
        self._begin_tile()
        some = self._cut_out(wholes[0], 0, rows.start, len(rows), part)
        return Slot(self._wide(_aten.mm.default, (Slot(some), Slot(wholes[1])), part))

    # ------------------------------------------------------------ results

    def _collect(self) -> None:
        """Add up the loss, and put the groups' logits and errors behind each other."""
        recording, program = self._plan.recording, self._program
        program.in_sections = recording.flow >= 0
        if recording.loss >= 0:
            program.loss = self._input("loss")
            args = (Slot(program.loss), self._of_groups(recording.loss), 0)
            self._once(OPS.sum_parts.default, args, "loss")
        program.logits = self._together(recording.logits, "logits")
        if recording.error >= 0:
            program.error = self._together(recording.error, "error")

    def _of_groups(self, value: int) -> list[Slot]:
        return [Slot(self._slots[value, group]) for group in range(len(self._sizes))]

    def _together(self, value: int, layer: str) -> int:
        place = self._new()
        self._once(_aten.cat.default, (self._of_groups(value), 0), layer, place)
        return place

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
            if name in self._plan.rows:
                self._update_rows(name, numbers)
            elif numbers > self._slice and name not in self._plan.recording.scattered:
                self._update_slices(name, numbers)
            else:
                self._add_up(name, self._input(f"g:{name}"), 0)
                bucket.append(name)
            if sum(torch.Size(self._shapes[n]).numel() for n in bucket) >= self._slice // 2:
                self._move_bucket(bucket)
                bucket = []
        if bucket:
            self._move_bucket(bucket)

    def _parts_of(self, name: str) -> list[Slot]:
        value = self._plan.recording.gradients[name]
        if self._plan.kinds[value] == "shared":
            return [Slot(self._slots[value, -1])]
        return list(dict.fromkeys(self._of_groups(value)))

    def _add_up(self, name: str, out: int, first: int) -> None:
        """Add up what the groups found of a gradient, from some row on."""
        args = (Slot(out), self._parts_of(name), first)
        self._once(OPS.sum_parts.default, args, name, kind="update")

    def _narrowed(self, source: Slot, rows: range, name: str) -> int:
        out = self._new()
        args = (source, 0, rows.start, len(rows))
        self._once(_aten.narrow.default, args, name, out, "update")
        return out

    def _update_slices(self, name: str, numbers: int) -> None:
        """Do a large weight in several tasks: each takes some of its rows."""
        for rows in even_ranges(self._shapes[name][0], -(-numbers // self._slice)):
            taken = self._taken(name, rows)
            self._add_up(name, taken["g"], rows.start)
            self._move({kind: [place] for kind, place in taken.items()}, name)

    def _update_rows(self, name: str, numbers: int) -> None:
        """Make the gradient of a large layer and move its weights, some rows at a time."""
        for rows in even_ranges(self._shapes[name][0], -(-numbers // _TILE)):
            made = self._gradient_rows(name, rows)
            taken = self._taken(name, rows)
            args = (Slot(taken["g"]), made, False)
            self._once(_aten.copy_.default, args, name, kind="update")
            self._move({kind: [place] for kind, place in taken.items()}, name)
        self._tile = -1

    def _taken(self, name: str, rows: range) -> dict[str, int]:
        kinds = ("g", *self._moved)
        return {k: self._narrowed(Slot(self._input(f"{k}:{name}")), rows, name) for k in kinds}

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
