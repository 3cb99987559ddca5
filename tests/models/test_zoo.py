"""The papers' networks have exactly the papers' sizes, and a user's own fits or is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.errors import ConfigError
from convoy.models.blocks import count_parameters, count_weight_layers
from convoy.models.dropout import SampleDropout
from convoy.models.zoo import RESNET_DEPTHS, ZOO, adopt_model, build_model, check_model_name

_CIFAR = (3, 32, 32)
_MNIST = (1, 28, 28)

_SIZES = [
    ("lenet5", _MNIST, 61_706, 5),
    ("alexnet", _CIFAR, 23_272_266, 8),
    ("vgg16", _CIFAR, 15_245_130, 16),
    ("vgg16-bn", _CIFAR, 15_253_578, 16),
    ("resnet20", _CIFAR, 269_722, 20),
    ("resnet32", _CIFAR, 464_154, 32),
    ("resnet44", _CIFAR, 658_586, 44),
    ("resnet56", _CIFAR, 853_018, 56),
    ("resnet110", _CIFAR, 1_727_962, 110),
    ("resnet224", _CIFAR, 3_575_066, 224),
    ("resnet362", _CIFAR, 5_811_034, 362),
]


@pytest.mark.parametrize(("name", "in_shape", "parameters", "depth"), _SIZES)
def test_a_network_has_exactly_the_size_and_depth_of_its_paper(
    name: str, in_shape: tuple[int, int, int], parameters: int, depth: int
) -> None:
    with torch.device("meta"):
        model = ZOO[name](in_shape, 10)
    assert count_parameters(model) == parameters
    assert count_weight_layers(model) == depth


def test_every_network_of_the_zoo_is_measured_here() -> None:
    assert [name for name, *_ in _SIZES] == list(ZOO)
    assert RESNET_DEPTHS == (20, 32, 44, 56, 110, 224, 362)


@pytest.mark.parametrize("name", ["lenet5", "vgg16", "vgg16-bn", "resnet20"])
def test_weights_follow_from_the_seed_alone(name: str) -> None:
    first = build_model(name, _CIFAR, 10, seed=1).state_dict()
    torch.rand(5)
    second = build_model(name, _CIFAR, 10, seed=1).state_dict()
    other = build_model(name, _CIFAR, 10, seed=2).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    weights = [key for key in first if key.endswith("weight") and first[key].ndim > 1]
    assert weights
    assert not any(torch.equal(first[key], other[key]) for key in weights)


@pytest.mark.parametrize(("name", "fan"), [("resnet20", 1), ("vgg16", 0)])
def test_convolutions_start_at_the_scale_for_rectifiers(name: str, fan: int) -> None:
    model = build_model(name, _CIFAR, 10, seed=0)
    for layer in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
        expected = (2 / (9 * layer.weight.shape[fan])) ** 0.5
        assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.15)
        assert layer.bias is None or not layer.bias.any()


@pytest.mark.parametrize(
    ("name", "in_shape", "num_classes"),
    [
        ("lenet5", _MNIST, 10),
        ("lenet5", (3, 32, 32), 7),
        ("lenet5", (1, 12, 20), 2),
        ("alexnet", (1, 28, 28), 3),
        ("alexnet", (3, 15, 17), 3),
        ("vgg16", (1, 32, 40), 4),
        ("vgg16-bn", (3, 32, 32), 4),
        ("resnet20", (1, 28, 28), 5),
        ("resnet20", (3, 9, 7), 100),
    ],
)
def test_the_output_is_one_logit_per_class(
    name: str, in_shape: tuple[int, int, int], num_classes: int
) -> None:
    model = build_model(name, in_shape, num_classes, seed=0)
    images = torch.zeros(3, *in_shape)
    assert model(images).shape == (3, num_classes)


@pytest.mark.parametrize(
    ("name", "in_shape"),
    [
        ("lenet5", (1, 11, 28)),
        ("lenet5", (1, 28, 11)),
        ("alexnet", (3, 14, 32)),
        ("alexnet", (3, 32, 14)),
        ("vgg16", (3, 31, 32)),
        ("vgg16-bn", (3, 32, 31)),
    ],
)
def test_images_that_are_too_small_are_refused(name: str, in_shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="images are too small for") as caught:
        build_model(name, in_shape, 10, seed=0)
    assert str(in_shape) in str(caught.value)


def test_dropout_goes_by_sample_in_every_built_network() -> None:
    model = build_model("vgg16", _CIFAR, 10, seed=0)
    assert sum(isinstance(module, SampleDropout) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


@pytest.mark.parametrize("ask", [check_model_name, lambda name: build_model(name, _CIFAR, 10, 0)])
def test_an_unknown_name_is_refused_with_the_closest_one(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match="unknown model; got 'resnet21'") as caught:
        ask("resnet21")
    assert "Did you mean 'resnet" in str(caught.value)
    assert "vgg16-bn" in str(caught.value)
    assert "MODULE:CALLABLE" in str(caught.value)


@pytest.mark.parametrize("name", [*ZOO, "my_module:make"])
def test_known_names_and_user_targets_pass_the_check(name: str) -> None:
    check_model_name(name)


def _build(tmp_path: Path, module: str, text: str) -> nn.Module:
    (tmp_path / f"{module}.py").write_text(f"from torch import nn\n\n\n{text}\n")
    return build_model(f"{module}:make", (1, 4, 4), 3, seed=0)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "zoo_none",
            "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))",
        ),
        (
            "zoo_both",
            "def make(num_classes, in_shape):\n"
            "    c, h, w = in_shape\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, num_classes))",
        ),
        (
            "zoo_classes",
            "def make(num_classes):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))",
        ),
        (
            "zoo_shape",
            "def make(in_shape, width=16):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(width, 2 + in_shape[0]))",
        ),
        (
            "zoo_class",
            "class make(nn.Module):\n"
            "    def __init__(self, num_classes):\n"
            "        super().__init__()\n"
            "        self.fc = nn.Linear(16, num_classes)\n"
            "    def forward(self, x):\n"
            "        return self.fc(x.flatten(1))",
        ),
    ],
)
def test_a_users_callable_is_given_what_it_names(tmp_path: Path, module: str, text: str) -> None:
    model = _build(tmp_path, module, text)
    assert model(torch.zeros(5, 1, 4, 4)).shape == (5, 3)
    assert count_parameters(model) == 51


def test_a_users_weights_follow_from_the_seed(tmp_path: Path) -> None:
    text = "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))"
    first = _build(tmp_path, "zoo_seeded", text).state_dict()["1.weight"]
    torch.rand(5)
    assert torch.equal(first, _build(tmp_path, "zoo_seeded", text).state_dict()["1.weight"])


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("zoo_fails", "def make():\n    raise KeyError('reason')", "failed: KeyError: 'reason'"),
        ("zoo_needs", "def make(depth):\n    return depth", "failed: TypeError"),
        ("zoo_number", "def make():\n    return 3", "must return an nn.Module; got 'int'"),
        (
            "zoo_narrow",
            "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))",
            r"gives the wrong output; got \(2, 2\); allowed: \(2, 3\)",
        ),
        ("zoo_images", "def make():\n    return nn.Conv2d(1, 3, 1)", "gives the wrong output"),
        (
            "zoo_misfit",
            "def make():\n    return nn.Linear(7, 3)",
            r"cannot take images of shape \(1, 4, 4\)",
        ),
        ("zoo_idle", "def make():\n    return nn.Flatten()", "has nothing to train"),
        (
            "zoo_frozen",
            "def make():\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).requires_grad_(False)",
            "has nothing to train",
        ),
    ],
)
def test_a_users_model_of_no_use_is_refused(
    tmp_path: Path, module: str, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        _build(tmp_path, module, text)
    assert f"{module}:make" in str(caught.value)


def test_a_users_callable_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model 'zoo_absent:make' cannot be imported"):
        build_model("zoo_absent:make", (1, 4, 4), 3, seed=0)


@pytest.mark.parametrize("training", [True, False])
def test_checking_a_model_leaves_its_state_alone(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3)).train(training)
    former = {key: value.clone() for key, value in model.state_dict().items()}
    adopted = adopt_model(model, (1, 4, 4), 3, "mine")
    assert adopted is model
    assert model.training == training
    assert all(torch.equal(former[key], value) for key, value in model.state_dict().items())


def test_a_model_that_swallows_the_batch_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean: torch.Tensor = self.fc(x.flatten(1)).mean(0, keepdim=True)
            return mean

    with pytest.raises(ConfigError, match="wrong output"):
        adopt_model(Mean(), (1, 2, 2), 3, "mean")
