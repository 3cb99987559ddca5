"""A training step as a list of ATen operations, recorded once and good for any number of samples.

The step is traced twice, with two and with three samples. Whatever differs between the traces
grows with the number of samples: sizes in arguments, and one dimension of every value that has a
sample in each place. From that the operations for any number of samples follow.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from convoy.inner.arithmetic import Arithmetic
from convoy.models.dropout import drop_by

_FEW, _MORE = 2, 3  # samples of the two traces
_aten = torch.ops.aten
_PIECES = frozenset(
    {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
)  # they give a list


class CannotCaptureError(Exception):
    """A network's step is not a fixed list of operations on samples; the text says why."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value that an operation takes or gives, by its number."""

    value: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number among the arguments that grows with the samples: base + slope * samples."""

    base: int
    slope: int

    def at(self, samples: int) -> int:
        """Return the number for so many samples."""
        return self.base + self.slope * samples


@dataclass(eq=False, slots=True)
class Operation:
    """One call of an ATen operator.

    Attributes:
        args, kwargs: constants, `Ref`s and `Size`s, also in lists.
        outs: the values it gives; None where nobody asks for one.
        layer: the part of the network it belongs to, for people.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    layer: str = ""


@dataclass(eq=False, slots=True)
class Recording:
    """A step: operations in an order that works, and what goes in and comes out.

    Attributes:
        operations: forward, loss and backward.
        parameters, buffers: the value of each, by its name.
        images, labels, keys, scale: what else goes in; `keys` may be unused.
        gradients: the value of each parameter's gradient, by the parameter's name.
        new_buffers: what becomes of each buffer.
        loss, logits: the sum of losses, and what the network said.
        batched: for each value that holds samples, the dimension that counts them.
        shapes, types: of each value, for two samples.
    """

    operations: list[Operation] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    images: int = -1
    labels: int = -1
    keys: int = -1
    scale: int = -1
    gradients: dict[str, int] = field(default_factory=dict)
    new_buffers: dict[str, int] = field(default_factory=dict)
    loss: int = -1
    logits: int = -1
    batched: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    types: dict[int, torch.dtype] = field(default_factory=dict)
    num_values: int = 0


def capture(
    model: nn.Module,
    arithmetic: Arithmetic,
    in_shape: tuple[int, int, int],
    *,
    label_smoothing: float = 0.0,
) -> Recording:
    """Record a network's training step.

    Raises:
        CannotCaptureError: the network decides by the values it computes, draws random numbers
            of its own, or keeps statistics that cannot be followed.
    """
    _refuse_what_traces_wrongly(model)
    was_training = model.training
    if not was_training:  # as the plain executor does: a part may be kept out of training
        model.train()
    try:
        with torch.random.fork_rng(
            devices=[]
        ):  # who draws random numbers draws the same without us
            few, more = (
                _trace(model, arithmetic, in_shape, samples, label_smoothing)
                for samples in (_FEW, _MORE)
            )
        return _Reader(model, few, more).read()
    except CannotCaptureError:
        raise
    except Exception as error:  # a model may refuse to be traced in any way
        raise CannotCaptureError(_why(error)) from error
    finally:
        if not was_training:
            model.eval()


def _why(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    if "_local_scalar_dense" in text:
        return "it decides by the values it computes"
    return f"it cannot be traced ({type(error).__name__}: {text})"


def _refuse_what_traces_wrongly(model: nn.Module) -> None:
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if is_norm and module.momentum is None and module.track_running_stats:
            raise CannotCaptureError(f"'{name}' averages its statistics over all steps")
    if any(not p.requires_grad for p in model.parameters()):
        raise CannotCaptureError("some of its weights are frozen")


def _trace(
    model: nn.Module,
    arithmetic: Arithmetic,
    in_shape: tuple[int, int, int],
    samples: int,
    label_smoothing: float,
) -> fx.GraphModule:
    """Run a step on random samples and return what was called."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    images = torch.randn(samples, *in_shape, dtype=arithmetic.dtype)
    images = images.to(memory_format=arithmetic.memory_format)
    labels, keys = torch.zeros(samples, dtype=torch.int64), torch.arange(samples)
    scale = torch.ones((), dtype=arithmetic.dtype)

    def step(
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
        keys: Tensor,
        scale: Tensor,
    ) -> object:
        def loss_of(weights: Mapping[str, Tensor]) -> tuple[Tensor, object]:
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            with drop_by(keys), arithmetic.autocast(cached=False):
                logits = functional_call(model, (dict(weights), own), (images,))
                loss = functional.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=label_smoothing
                )
            return loss, (loss.detach(), logits.detach(), own)

        loss, pull_back, rest = vjp(loss_of, parameters, has_aux=True)  # type: ignore[misc]
        (gradients,) = pull_back(scale.to(loss.dtype))
        return gradients, rest

    traced: fx.GraphModule = make_fx(functionalize(step))(
        parameters, buffers, images, labels, keys, scale
    )
    traced.graph.eliminate_dead_code()
    return traced


class _Reader:
    """Turns two traces into a recording."""

    def __init__(self, model: nn.Module, few: fx.GraphModule, more: fx.GraphModule) -> None:
        self._model = model
        self._few, self._more = list(few.graph.nodes), list(more.graph.nodes)
        self._constants = few
        self._numbers: dict[str, int] = {}  # of the values, by the node's name
        self._found = Recording()

    def read(self) -> Recording:
        """Go through both traces side by side."""
        if len(self._few) != len(self._more):
            raise CannotCaptureError("it does other things for another number of samples")
        places = [n for n in self._few if n.op == "placeholder"]
        self._name_inputs(places)
        for node, other in zip(self._few, self._more, strict=True):
            if node.target != other.target and node.op != "output":
                raise CannotCaptureError("it does other things for another number of samples")
            if node.op == "call_function":
                self._read_call(node, other)
            elif node.op == "get_attr":
                raise CannotCaptureError("it holds tensors that are neither weights nor buffers")
            elif node.op == "placeholder":
                self._note_shape(self._numbers[node.name], node, other)
        self._name_outputs(self._few[-1])
        return self._found

    def _new_value(self, name: str) -> int:
        self._numbers[name] = self._found.num_values
        self._found.num_values += 1
        return self._numbers[name]

    def _name_inputs(self, places: list[fx.Node]) -> None:
        found = self._found
        numbers = [self._new_value(node.name) for node in places]
        weights = [name for name, _ in self._model.named_parameters()]
        buffers = [name for name, _ in self._model.named_buffers()]
        assert len(numbers) == len(weights) + len(buffers) + 4
        found.parameters = dict(zip(weights, numbers, strict=False))
        found.buffers = dict(zip(buffers, numbers[len(weights) :], strict=False))
        found.images, found.labels, found.keys, found.scale = numbers[-4:]

    def _name_outputs(self, node: fx.Node) -> None:
        found = self._found
        flat = [self._numbers[item.name] for item in node.args[0]]  # type: ignore[index, union-attr]
        count = len(found.parameters)
        found.gradients = dict(zip(found.parameters, flat, strict=False))
        found.loss, found.logits = flat[count], flat[count + 1]
        found.new_buffers = dict(zip(found.buffers, flat[count + 2 :], strict=True))

    def _read_call(self, node: fx.Node, other: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # taken care of where the tuple is made
        op = node.target
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            raise CannotCaptureError(f"it draws random numbers of its own ({op})")
        if op in _PIECES:
            self._read_pieces(node, other)
            return
        args = self._merged(node.args, other.args)
        kwargs = {key: self._merged(v, other.kwargs[key]) for key, v in node.kwargs.items()}
        self._found.operations.append(
            Operation(op, args, kwargs, self._outs(node, other), _layer_of(node))
        )

    def _read_pieces(self, node: fx.Node, other: fx.Node) -> None:
        """Read what cuts a value into a list as a cut of its own for each piece that is used."""
        others = {user.args[1]: user for user in other.users}
        for user in node.users:
            place: Any = user.args[1]
            if place not in others:
                raise CannotCaptureError("it does other things for another number of samples")
            op, args = _piece_of(node, place)
            args = self._merged(args, _piece_of(other, place)[1])
            number = self._new_value(user.name)
            self._note_shape(number, user, others[place])
            self._found.operations.append(Operation(op, args, {}, (number,), _layer_of(node)))

    def _outs(self, node: fx.Node, other: fx.Node) -> tuple[int | None, ...]:
        returns = len(node.target._schema.returns)  # type: ignore[union-attr]
        if returns == 1:
            number = self._new_value(node.name)
            self._note_shape(number, node, other)
            return (number,)
        outs: list[int | None] = [None] * returns
        others = {user.args[1]: user for user in other.users}
        for user in node.users:
            place: Any = user.args[1]
            if user.users:
                outs[place] = self._new_value(user.name)
                self._note_shape(self._numbers[user.name], user, others[place])
        return tuple(outs)

    def _note_shape(self, number: int, node: fx.Node, other: fx.Node) -> None:
        few, more = (tuple(n.meta["tensor_meta"].shape) for n in (node, other))
        self._found.shapes[number] = few
        self._found.types[number] = node.meta["tensor_meta"].dtype
        if len(few) != len(more):
            raise CannotCaptureError("the shape of its values changes with the samples")
        growing = [d for d, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
        if len(growing) > 1:
            raise CannotCaptureError("it compares samples with each other")
        if growing:
            self._found.batched[number] = growing[0]

    def _merged(self, few: Any, more: Any) -> Any:
        """Return an argument with what grows with the samples made a `Size`."""
        if isinstance(few, fx.Node):
            return Ref(self._numbers[few.name])
        if isinstance(few, (list, tuple)):
            if len(few) != len(more):
                raise CannotCaptureError("it does other things for another number of samples")
            return type(few)(self._merged(a, b) for a, b in zip(few, more, strict=True))
        if type(few) is int and few != more:
            slope = (more - few) // (_MORE - _FEW)
            return Size(few - slope * _FEW, slope)
        if few != more:
            raise CannotCaptureError("it computes with the number of samples")
        return few


def _piece_of(node: fx.Node, place: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that gives one of the pieces into which an operation cuts a value."""
    source, *rest = node.args
    if node.target is _aten.unbind.int:
        return _aten.select.int, (source, *(rest or [0]), place)
    sizes, dim = (*rest, 0)[:2]
    lengths: Any = [sizes] * (place + 1) if isinstance(sizes, int) else sizes
    start = sum(lengths[:place])
    return _aten.slice.Tensor, (source, dim, start, start + lengths[place])


def _layer_of(node: fx.Node) -> str:
    """Return the module that an operation was called in, if the trace knows."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(entry[0]) for entry in stack.values()]
    return names[-1] if names else ""


def map_refs(item: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with its `Ref`s and `Size`s replaced."""
    if isinstance(item, (Ref, Size)):
        return function(item)
    if isinstance(item, (list, tuple)):
        return type(item)(map_refs(part, function) for part in item)
    return item


def refs_in(operation: Operation) -> list[int]:
    """Return the values that an operation reads."""
    found: list[int] = []

    def note(item: object) -> object:
        if isinstance(item, Ref):
            found.append(item.value)
        return item

    map_refs(operation.args, note)
    map_refs(tuple(operation.kwargs.values()), note)
    return found
