"""The papers' networks by name, and the door for any other."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from convoy.errors import ConfigError, unknown_name
from convoy.models.alexnet import alexnet
from convoy.models.dropout import key_dropout
from convoy.models.lenet import lenet5
from convoy.models.resnet import resnet
from convoy.models.vgg import vgg16, vgg16_bn
from convoy.randomness import fold
from convoy.registry import is_user_target, load_user_callable

Builder = Callable[[tuple[int, int, int], int], nn.Module]

RESNET_DEPTHS = (20, 32, 44, 56, 110, 224, 362)
ZOO: dict[str, Builder] = {
    "lenet5": lenet5,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "vgg16-bn": vgg16_bn,
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in RESNET_DEPTHS},
}


def build_model(
    name: str, in_shape: tuple[int, int, int], num_classes: int, seed: int
) -> nn.Module:
    """Build a network of the zoo, or the user's own, with weights that follow from the seed.

    Args:
        name: a name of the zoo, or "module:callable". A callable may take `in_shape` and
            `num_classes`, and is given those of the two that it names.
        in_shape: channels, height and width of an image.
        num_classes: how many logits the network must give.
        seed: decides the initial weights.
    """
    check_model_name(name)
    torch.manual_seed(fold(seed, 3))
    build = ZOO.get(name) or partial(_build_user_model, name)
    return adopt_model(build(in_shape, num_classes), in_shape, num_classes, name)


def check_model_name(name: str) -> None:
    """Refuse what is neither a name of the zoo nor has the form "module:callable"."""
    if name not in ZOO and not is_user_target(name):
        raise unknown_name("model", name, ZOO, or_else="MODULE:CALLABLE")


def adopt_model(
    model: nn.Module, in_shape: tuple[int, int, int], num_classes: int, name: str
) -> nn.Module:
    """Make a network fit for training here: checked, and with dropout that goes by sample."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"the model '{name}' has nothing to train")
    _check_output(model, in_shape, num_classes, name)
    return key_dropout(model)


def _build_user_model(target: str, in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    build = load_user_callable(target, "model")
    offered = {"in_shape": in_shape, "num_classes": num_classes}
    try:
        accepted = inspect.signature(build).parameters
        model = build(**{key: value for key, value in offered.items() if key in accepted})
    except Exception as error:  # the user's function may fail in any way
        raise ConfigError(f"'{target}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"'{target}' must return an nn.Module", got=type(model).__name__)
    return model


def _check_output(
    model: nn.Module, in_shape: tuple[int, int, int], num_classes: int, name: str
) -> None:
    """Run two blank images through, so that a misfit shows before any work is done."""
    reference = next(model.parameters())
    blank = torch.zeros(2, *in_shape, dtype=reference.dtype, device=reference.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            shape = tuple(model(blank).shape)
    except Exception as error:  # a model may refuse an input in any way
        raise ConfigError(
            f"the model '{name}' cannot take images of shape {in_shape}: {error}"
        ) from error
    finally:
        model.train(was_training)
    if len(shape) != 2 or shape[0] != 2 or shape[1] < num_classes:
        raise ConfigError(
            f"the model '{name}' gives the wrong output",
            got=shape,
            allowed=f"(2, {num_classes}) for two images and {num_classes} classes",
        )
