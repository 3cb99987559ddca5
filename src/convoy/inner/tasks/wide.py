"""Large fully connected layers, cut by neurons instead of samples: no group reads all weights."""

import torch

from convoy.inner.tasks.plan import Part, Plan

_aten = torch.ops.aten
WIDE = 1 << 20  # weights of a fully connected layer from which on it is cut by neurons


def widen(plan: Plan) -> None:
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
            if name in recording.gradients.keys() - recording.scattered and (
                recording.batched.get(left) == 1
            ):
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
