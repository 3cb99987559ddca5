"""AlexNet in its CIFAR form: five 3x3 convolutions, then 4096-4096 and the classes."""

from collections import OrderedDict

from torch import nn

from convoy.errors import ConfigError


def alexnet(in_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """Build AlexNet; the first convolution has stride 2 and three poolings halve the rest."""
    channels, height, width = in_shape
    h, w = ((side + 1) // 2 // 8 for side in (height, width))
    if h < 1 or w < 1:
        raise ConfigError("the images are too small for alexnet", got=in_shape, allowed="15x15 up")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, stride=2, padding=1),
            relu1=nn.ReLU(inplace=True),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 192, 3, padding=1),
            relu2=nn.ReLU(inplace=True),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(inplace=True),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(inplace=True),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            relu5=nn.ReLU(inplace=True),
            pool5=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            drop1=nn.Dropout(0.5),
            fc1=nn.Linear(256 * h * w, 4096),
            relu6=nn.ReLU(inplace=True),
            drop2=nn.Dropout(0.5),
            fc2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(inplace=True),
            fc3=nn.Linear(4096, num_classes),
        )
    )
