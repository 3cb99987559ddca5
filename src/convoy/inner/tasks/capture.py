"""A training step as a list of ATen operations, recorded once and good for any number of samples.

It is a whole network's step with its loss, or the two passes of a part of one (a pipeline's
stage). Both are traced twice, with two and with three samples. Whatever differs between the
traces grows with the number of samples: sizes in arguments, and one dimension of every value that
has a sample in each place. From that the operations for any number of samples follow.
"""

import operator
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.recording import Operation, Recording, Ref, Size
from convoy.models.dropout import drop_by

Tensors = Mapping[str, Tensor]  # by name

_FEW, _MORE = 2, 3  # samples of the two traces
_aten = torch.ops.aten
_PIECES = frozenset(
    {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
)  # they give a list


class CannotCaptureError(Exception):
    """A network's step is not a fixed list of operations on samples; the text says why."""


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
    return _capture(model, _WholeStep(model, arithmetic, in_shape, label_smoothing))


def capture_passes(
    part: nn.Module, arithmetic: Arithmetic, like: Tensor, *, wants_error: bool
) -> Recording:
    """Record the two passes of a part of a network.

    Args:
        part: some of the network's blocks.
        arithmetic: how to compute.
        like: what goes in, of some samples.
        wants_error: somebody waits for the gradient of what goes in.

    Raises:
        CannotCaptureError: as `capture` does.
    """
    return _capture(part, _Passes(part, arithmetic, like, wants_error=wants_error))


class _Traced(Protocol):
    """What is traced: a function of weights, buffers and further tensors.

    It gives the weights' gradients, then further tensors, then the buffers.

    Attributes:
        takes, gives: what the further ones are, by their names in a recording.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def inputs(self, samples: int) -> tuple[Tensor, ...]:
        """Return the further ones for some samples."""
        ...

    def __call__(self, weights: Tensors, buffers: Tensors, *inputs: Tensor) -> object:
        """Do a step."""
        ...


class _WholeStep:
    """A network's step."""

    takes: tuple[str, ...] = ("images", "labels", "keys", "scale")
    gives: tuple[str, ...] = ("loss", "logits")

    def __init__(
        self,
        model: nn.Module,
        arithmetic: Arithmetic,
        in_shape: tuple[int, int, int],
        label_smoothing: float,
    ) -> None:
        self._model, self._arithmetic = model, arithmetic
        self._in_shape, self._label_smoothing = in_shape, label_smoothing

    def inputs(self, samples: int) -> tuple[Tensor, ...]:
        way = self._arithmetic
        images = torch.randn(samples, *self._in_shape, dtype=way.dtype)
        images = images.to(memory_format=way.memory_format)
        labels = torch.zeros(samples, dtype=torch.int64)
        return images, labels, torch.arange(samples), torch.ones((), dtype=way.dtype)

    def __call__(self, weights: Tensors, buffers: Tensors, *inputs: Tensor) -> object:
        images, labels, keys, scale = inputs

        def loss_of(weights: Tensors) -> tuple[Tensor, object]:
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            with drop_by(keys), self._arithmetic.autocast(cached=False):
                logits = functional_call(self._model, (dict(weights), own), (images,))
                loss = functional.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=self._label_smoothing
                )
            return loss, (loss.detach(), logits.detach(), own)

        loss, pull_back, rest = vjp(loss_of, weights, has_aux=True)  # type: ignore[misc]
        (gradients,) = pull_back(scale.to(loss.dtype))
        return gradients, rest


class _Passes:
    """The passes of a part of a network."""

    takes: tuple[str, ...] = ("images", "keys", "flow")

    def __init__(
        self, part: nn.Module, arithmetic: Arithmetic, like: Tensor, *, wants_error: bool
    ) -> None:
        self._part, self._arithmetic, self._like = part, arithmetic, like
        self.gives: tuple[str, ...] = ("logits", "error") if wants_error else ("logits",)

    def inputs(self, samples: int) -> tuple[Tensor, ...]:
        x = torch.randn(samples, *self._like.shape[1:]).to(self._like.dtype)
        x, keys = x.to(memory_format=layout_of(self._like)), torch.arange(samples)
        weights = {name: p.detach() for name, p in self._part.named_parameters()}
        buffers = {name: b.detach().clone() for name, b in self._part.named_buffers()}
        with torch.no_grad():
            y, _ = self._pass(weights, buffers, x, keys)
        return x, keys, torch.zeros_like(y)

    def __call__(self, weights: Tensors, buffers: Tensors, *inputs: Tensor) -> object:
        x, keys, flow = inputs

        def y_of(weights: Tensors, x: Tensor) -> tuple[Tensor, object]:
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            y, own = self._pass(weights, own, x, keys)
            return y, (y.detach(), own)

        _, pull_back, (y, own) = vjp(y_of, weights, x, has_aux=True)  # type: ignore[misc]
        gradients, error = pull_back(flow)
        return (gradients, y, error, own) if "error" in self.gives else (gradients, y, own)

    def _pass(
        self, weights: Tensors, own: dict[str, Tensor], x: Tensor, keys: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with drop_by(keys), self._arithmetic.autocast(cached=False):
            y: Tensor = functional_call(self._part, (dict(weights), own), (x,))
        return y, own


def layout_of(images: Tensor) -> torch.memory_format:
    """Return how images, or what is no image, lie in memory."""
    by_channel = images.dim() == 4 and not images.is_contiguous()
    return torch.channels_last if by_channel else torch.contiguous_format


def _capture(model: nn.Module, traced: _Traced) -> Recording:
    _refuse_what_traces_wrongly(model)
    was_training = model.training
    if not was_training:  # as the plain executor does: a part may be kept out of training
        model.train()
    try:
        with torch.random.fork_rng(
            devices=[]
        ):  # who draws random numbers draws the same without us
            few, more = (_trace(model, traced, samples) for samples in (_FEW, _MORE))
        recording = _Reader(model, traced, few, more).read()
        recording.scattered = {n for n, p in model.named_parameters() if _is_scattered(p)}
        return recording
    except CannotCaptureError:
        raise
    except Exception as error:  # a model may refuse to be traced in any way
        raise CannotCaptureError(_why(error)) from error
    finally:
        if not was_training:
            model.eval()


def first_line(error: BaseException) -> str:
    """Return in short what went wrong."""
    text = str(error).strip().split("\n", 1)[0]
    if text and isinstance(error, RuntimeError):
        return text
    return f"{type(error).__name__} {text}".strip()


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


def _is_scattered(parameter: Tensor) -> bool:
    rows_apart = [
        s for s, size in zip(parameter.stride(), parameter.shape, strict=True) if size > 1
    ]
    return parameter.ndim > 0 and len(parameter) > 1 and rows_apart[0] < max(rows_apart)


def _trace(model: nn.Module, traced: _Traced, samples: int) -> fx.GraphModule:
    """Run a step on random samples and return what was called."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def step(parameters: Tensors, buffers: Tensors, *inputs: Tensor) -> object:
        return traced(parameters, buffers, *inputs)  # a function of its own: it is inspected

    inputs = traced.inputs(samples)
    found: fx.GraphModule = make_fx(functionalize(step))(parameters, buffers, *inputs)
    found.graph.eliminate_dead_code()
    return found


class _Reader:
    """Turns two traces into a recording."""

    def __init__(
        self, model: nn.Module, traced: _Traced, few: fx.GraphModule, more: fx.GraphModule
    ) -> None:
        self._model, self._traced = model, traced
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
        takes = self._traced.takes
        assert len(numbers) == len(weights) + len(buffers) + len(takes)
        found.parameters = dict(zip(weights, numbers, strict=False))
        found.buffers = dict(zip(buffers, numbers[len(weights) :], strict=False))
        for name, number in zip(takes, numbers[-len(takes) :], strict=True):
            setattr(found, name, number)

    def _name_outputs(self, node: fx.Node) -> None:
        found = self._found
        flat = [self._numbers[item.name] for item in node.args[0]]  # type: ignore[index, union-attr]
        count, gives = len(found.parameters), self._traced.gives
        found.gradients = dict(zip(found.parameters, flat, strict=False))
        for name, number in zip(gives, flat[count:], strict=False):
            setattr(found, name, number)
        found.new_buffers = dict(zip(found.buffers, flat[count + len(gives) :], strict=True))

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
