"""A user's own data comes as arrays, image sets, or items of any kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from convoy.config import Config
from convoy.data.images import ImageSet, TrainTest, make_image_set
from convoy.data.load import content_digest, load_data, wrap_data
from convoy.data.sources.user import as_image_set
from convoy.errors import ConfigError, DataError
from convoy.tracking import untracked

_IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
_LABELS = np.arange(6) % 2


class _Items(Dataset[tuple[Any, Any]]):
    """A torch data set whose items are made by a function."""

    def __init__(self, make: Callable[[int], tuple[Any, Any]], count: int = 6) -> None:
        self._make = make
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._make(index)


def _turned(value: object) -> ImageSet:
    return as_image_set(value, "training", untracked)


def _assert_whole(images: ImageSet) -> None:
    assert np.array_equal(images.images_NCHW.numpy(), _IMAGES.transpose(0, 3, 1, 2))
    assert images.labels.tolist() == _LABELS.tolist()


@pytest.mark.parametrize(
    "value",
    [
        (_IMAGES, _LABELS),
        [_IMAGES, _LABELS],
        (torch.from_numpy(_IMAGES), torch.from_numpy(_LABELS)),
        (_IMAGES.transpose(0, 3, 1, 2), _LABELS),
        make_image_set(_IMAGES, _LABELS, None, "x"),
        _Items(lambda i: (Image.fromarray(_IMAGES[i]), int(_LABELS[i]))),
        _Items(lambda i: (_IMAGES[i], _LABELS[i])),
        _Items(lambda i: (torch.from_numpy(_IMAGES[i]).permute(2, 0, 1), torch.tensor(i % 2))),
        TensorDataset(torch.from_numpy(_IMAGES), torch.from_numpy(_LABELS)),
        [(image, label) for image, label in zip(_IMAGES, _LABELS, strict=True)],
    ],
    ids=[
        "pair",
        "list",
        "tensors",
        "nchw",
        "image-set",
        "pillow",
        "array-items",
        "tensor-items",
        "tensor-dataset",
        "plain-list",
    ],
)
def test_every_kind_of_data_gives_the_same_images(value: object) -> None:
    _assert_whole(_turned(value))


def test_float_tensors_of_a_data_set_stay_floats() -> None:
    made = _turned(_Items(lambda i: (torch.full((1, 4, 4), i / 8), i % 2)))
    assert made.images_NCHW.dtype == torch.float32
    assert made.images_NCHW[:, 0, 0, 0].tolist() == [i / 8 for i in range(6)]


def test_grey_pillow_images_have_one_channel() -> None:
    made = _turned(_Items(lambda i: (Image.fromarray(_IMAGES[i, :, :, 0]), i % 2)))
    assert made.shape_CHW == (1, 5, 4)


def test_class_names_of_a_data_set_are_kept() -> None:
    items = _Items(lambda i: (_IMAGES[i], _LABELS[i]))
    items.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    assert _turned(items).classes == ("cat", "dog")
    assert _turned(make_image_set(_IMAGES, _LABELS, ["a", "b"], "x")).classes == ("a", "b")


def _fail(index: int) -> tuple[Any, Any]:
    if index == 3:
        raise RuntimeError("my reason")
    return _IMAGES[index], 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "no known kind; got 'int'"),
        (None, "no known kind"),
        ([], "the training data has no samples"),
        (_Items(_fail), "sample 3 of the training data cannot be read: RuntimeError: my reason"),
        (_Items(lambda i: (_IMAGES[i], "dog")), "sample 0 of the training data cannot be read"),
        (_Items(lambda i: (_IMAGES[i, : 4 + i % 2], 0)), "images of different sizes"),
        ((_IMAGES, _LABELS[:-1]), "differ in number"),
        ((_IMAGES, _LABELS - 1), "negative"),
        ((_IMAGES[:0], _LABELS[:0]), "no samples"),
        ((_IMAGES / np.nan, _LABELS), "NaN"),
        (
            ImageSet(torch.zeros(2, 1, 3, 3), torch.tensor([0, 5]), ("a", "b")),
            "out of range; got 5",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_data_of_no_use_is_refused(value: object, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        _turned(value)


def _load(tmp_path: Path, module: str, body: str) -> TrainTest:
    text = f"import numpy as np\nimport torch\n\n\ndef make():\n    {body}\n"
    (tmp_path / f"{module}.py").write_text(text)
    return load_data(Config(data=f"{module}:make", cache_dir=str(tmp_path / "cache")))


_PAIR = "(np.arange({0} * 9, dtype=np.uint8).reshape({0}, 3, 3), np.arange({0}) % 2)"


def test_a_callable_gives_training_and_test_data(tmp_path: Path) -> None:
    data = _load(tmp_path, "user_good", f"return {_PAIR.format(4)}, {_PAIR.format(2)}")
    assert data.name == "user_good:make"
    assert data.train.images_NCHW.reshape(-1).tolist() == list(range(36))
    assert len(data.test) == 2
    assert data.augment == "none"
    assert data.mean == pytest.approx([17.5])


def test_a_callables_data_is_never_cached(tmp_path: Path) -> None:
    _load(tmp_path, "user_uncached", f"return {_PAIR.format(4)}, {_PAIR.format(2)}")
    assert not (tmp_path / "cache").exists()


def test_a_callables_digest_follows_its_content(tmp_path: Path) -> None:
    bodies = [f"return {_PAIR.format(4)}, {_PAIR.format(n)}" for n in (2, 2, 4)]
    first, same, other = (
        _load(tmp_path, f"user_digest{i}", body).digest for i, body in enumerate(bodies)
    )
    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("module", "body", "reason"),
    [
        ("user_raises", "raise KeyError('my reason')", "failed: KeyError: 'my reason'"),
        ("user_one", "return 3", "must return two data sets; got 'int'"),
        ("user_three", "return 1, 2, 3", "must return two data sets; got 'tuple'"),
        ("user_none", f"return {_PAIR.format(4)}, None", "the test data is of no known kind"),
        (
            "user_sizes",
            f"return {_PAIR.format(4)}, (np.zeros((2, 4, 4), np.uint8), np.arange(2))",
            "differ in shape",
        ),
        (
            "user_types",
            f"return {_PAIR.format(4)}, (np.zeros((2, 3, 3)), np.arange(2))",
            "differ in type",
        ),
        (
            "user_labels",
            f"return {_PAIR.format(4)}, (np.zeros((3, 3, 3), np.uint8), np.arange(3))",
            "not those of the training part",
        ),
    ],
)
def test_a_callable_that_gives_no_data_is_refused(
    tmp_path: Path, module: str, body: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        _load(tmp_path, module, body)


def test_a_callable_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="the data set 'user_absent:make' cannot be imported"):
        load_data(Config(data="user_absent:make"))


def test_image_sets_in_memory_are_wrapped_with_statistics_and_digest() -> None:
    train = make_image_set(_IMAGES, _LABELS, None, "x")
    data = wrap_data(train, train.select(torch.arange(2)))
    assert data.train is train
    assert data.mean == pytest.approx(_IMAGES.mean((0, 1, 2)).tolist())
    assert data.std == pytest.approx(_IMAGES.std((0, 1, 2)).tolist())
    assert data.digest == content_digest(data.train, data.test)
    assert data.digest != content_digest(data.test, data.train)
