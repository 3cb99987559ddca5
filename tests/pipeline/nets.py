"""Small networks that a whole run trains in seconds."""

from torch import Tensor, nn


def dropping(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return one that drops out in every stage."""
    assert in_shape == (1, 28, 28)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, stride=3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(6 * 8 * 8, 32),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(32, num_classes),
    )


def deep(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return one of many equal layers."""
    assert in_shape == (1, 28, 28)
    equal = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(14)]
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), *equal, nn.Flatten(), nn.Linear(8 * 13 * 13, num_classes)
    )


def normed(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return one whose blocks keep statistics."""
    assert in_shape == (1, 28, 28)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, num_classes),
    )


def frozen(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return one that begins with weights which are not trained."""
    net = normed(in_shape, num_classes)
    for parameter in (net.get_parameter("0.weight"), net.get_parameter("4.bias")):
        parameter.requires_grad_(False)
    return net


class _Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def deciding(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return one whose first stage decides by what it computes."""
    assert in_shape == (1, 28, 28)
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3),
        _Deciding(),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, num_classes),
    )
