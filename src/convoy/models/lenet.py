"""LeNet-5 in its classic form: 6 and 16 filters, then 120, 84 and one neuron per class."""

from collections import OrderedDict

from torch import nn

from convoy.errors import ConfigError


def lenet5(in_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """Build LeNet-5; 28x28 images are padded to the 32x32 it was drawn for."""
    channels, height, width = in_shape
    padding = 2 if min(height, width) <= 28 else 0
    h, w = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
    if h < 1 or w < 1:
        raise ConfigError("the images are too small for lenet5", got=in_shape, allowed="12x12 up")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=padding),
            relu1=nn.ReLU(inplace=True),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(inplace=True),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * h * w, 120),
            relu3=nn.ReLU(inplace=True),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(inplace=True),
            fc3=nn.Linear(84, num_classes),
        )
    )
