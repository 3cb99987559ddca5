"""How the tensors lie in memory that stages send each other."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convoy.errors import ConfigError
from convoy.inner.arithmetic import Arithmetic
from convoy.models.blocks import walk_units


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor lies in memory, for one sample more or less.

    Attributes:
        shape: of a sample.
        dtype: of the numbers.
        channels_last: the layout of images.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    def view(self, row: Tensor, samples: int) -> Tensor:
        """Return a row of memory as the tensor of so many samples."""
        if not self.channels_last:
            return row.view(samples, *self.shape)
        channels, height, width = self.shape
        return row.view(samples, height, width, channels).permute(0, 3, 1, 2)

    def numel(self, samples: int) -> int:
        """Return how many numbers so many samples are."""
        return samples * int(torch.Size(self.shape).numel())


def form_of(tensor: Tensor) -> Form:
    """Return how a batch's tensor lies in memory."""
    by_channel = tensor.dim() == 4 and not tensor.is_contiguous()
    return Form(tuple(tensor.shape[1:]), tensor.dtype, by_channel)


def forms_of(
    model: nn.Module, shape_chw: tuple[int, ...], arithmetic: Arithmetic
) -> tuple[Form, ...]:
    """Return how the output of each unit of a network lies in memory; nothing is learned.

    Raises:
        ConfigError: a unit writes over what it is given, which a stage still needs.
    """
    was_training = model.training
    model.eval()
    x = torch.zeros(2, *shape_chw, device=arithmetic.device, dtype=arithmetic.dtype)
    x = x.to(memory_format=arithmetic.memory_format)
    forms: list[Form] = []
    with torch.no_grad(), arithmetic.autocast():
        for name, unit in walk_units(model):
            given, before = x, x._version
            x = unit(given)
            if forms and given._version != before:
                raise ConfigError(
                    f"the block '{name}' writes over its input, so no stage can begin there",
                    hint="Let its first operation be one with inplace=False.",
                )
            forms.append(form_of(x))
    model.train(was_training)
    return tuple(forms)
