"""Residual networks for small images, 6n+2 layers deep, with option-A shortcuts (He et al.)."""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (16, 32, 64)


class Stem(nn.Module):
    """The first convolution, with its norm and rectifier."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x_nchw: Tensor) -> Tensor:
        """Return relu(norm(conv))."""
        return functional.relu(self.norm(self.conv(x_nchw)), inplace=True)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut.

    Option A: where the block halves the image and doubles the channels, the shortcut takes every
    second pixel and fills the new channels with zeros, so it has no weights.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self._stride = stride
        self._new_channels = channels - in_channels

    def forward(self, x_nchw: Tensor) -> Tensor:
        """Return relu(shortcut + residual)."""
        residual = functional.relu(self.norm1(self.conv1(x_nchw)), inplace=True)
        residual = self.norm2(self.conv2(residual))
        return functional.relu(residual + self._shortcut(x_nchw), inplace=True)

    def _shortcut(self, x_nchw: Tensor) -> Tensor:
        if self._new_channels == 0:
            return x_nchw
        half = self._new_channels // 2
        sampled = x_nchw[:, :, :: self._stride, :: self._stride]
        return functional.pad(sampled, (0, 0, 0, 0, half, self._new_channels - half))


class Head(nn.Module):
    """Mean over the image, then one neuron per class."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x_nchw: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.fc(x_nchw.mean(dim=(2, 3)))
        return logits


def resnet(in_shape: tuple[int, int, int], num_classes: int, *, depth: int) -> nn.Sequential:
    """Build a residual network of 6n+2 weight layers: 3 groups of n blocks."""
    assert depth % 6 == 2, depth
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    blocks["stem"] = Stem(in_shape[0], _WIDTHS[0])
    channels = _WIDTHS[0]
    for group, width in enumerate(_WIDTHS, start=1):
        for number in range(1, depth // 6 + 1):
            stride = 2 if width != channels else 1
            blocks[f"group{group}_block{number}"] = BasicBlock(channels, width, stride)
            channels = width
    blocks["head"] = Head(channels, num_classes)
    model = nn.Sequential(blocks)
    model.apply(_initialise)
    return model


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight)
