"""VGG-16 in its CIFAR form: thirteen 3x3 convolutions, then 512-512 and the classes."""

from collections import OrderedDict

from torch import nn

from convoy.errors import ConfigError

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(
    in_shape: tuple[int, int, int], num_classes: int, *, batch_norm: bool = False
) -> nn.Sequential:
    """Build VGG-16; the paper's size (15,245,130 weights) is the one without batch-norm."""
    channels, height, width = in_shape
    h, w = height // 32, width // 32
    if h < 1 or w < 1:
        raise ConfigError("the images are too small for vgg16", got=in_shape, allowed="32x32 up")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    number = 0
    for stage, widths in enumerate(_STAGES, start=1):
        for filters in widths:
            number += 1
            layers[f"conv{number}"] = nn.Conv2d(channels, filters, 3, padding=1)
            if batch_norm:
                layers[f"norm{number}"] = nn.BatchNorm2d(filters)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            channels = filters
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["drop1"] = nn.Dropout(0.5)
    layers["fc1"] = nn.Linear(512 * h * w, 512)
    layers["relu14"] = nn.ReLU(inplace=True)
    layers["drop2"] = nn.Dropout(0.5)
    layers["fc2"] = nn.Linear(512, 512)
    layers["relu15"] = nn.ReLU(inplace=True)
    layers["fc3"] = nn.Linear(512, num_classes)
    model = nn.Sequential(layers)
    model.apply(_initialise)
    return model


def vgg16_bn(in_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """Build VGG-16 with a batch-norm after each convolution, which is far easier to train."""
    return vgg16(in_shape, num_classes, batch_norm=True)


def _initialise(module: nn.Module) -> None:
    """Scale for rectifiers (He et al.): torch's default lets 13 plain layers fade to nothing."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        assert module.bias is not None
        nn.init.zeros_(module.bias)
