"""The data set that ships with the package is the one it is said to be."""

import hashlib
from pathlib import Path

import pytest
import torch

import convoy.data
from convoy.config import Config
from convoy.data.images import TrainTest
from convoy.data.load import load_data
from convoy.data.sources.idx import FASHION_CLASSES

_FOLDER = Path(convoy.data.__file__).parent / "embedded"
_SHA256 = "29687ebc82c20285477e0b8a8afd4170ffe64ded820397132b96062a9cd8e7e9"


@pytest.fixture(scope="module")
def fashion_mini(tmp_path_factory: pytest.TempPathFactory) -> TrainTest:
    cache = tmp_path_factory.mktemp("embedded")
    return load_data(Config(data="fashion-mini", cache_dir=str(cache)))


def test_it_has_ten_thousand_and_two_thousand_grey_images(fashion_mini: TrainTest) -> None:
    assert len(fashion_mini.train) == 10_000
    assert len(fashion_mini.test) == 2_000
    for part in (fashion_mini.train, fashion_mini.test):
        assert part.shape_CHW == (1, 28, 28)
        assert part.images_NCHW.dtype == torch.uint8


def test_its_classes_are_those_of_fashion_mnist_and_balanced(fashion_mini: TrainTest) -> None:
    assert fashion_mini.train.classes == FASHION_CLASSES
    assert torch.bincount(fashion_mini.train.labels).tolist() == [1000] * 10
    assert torch.bincount(fashion_mini.test.labels).tolist() == [200] * 10


def test_no_image_occurs_in_both_parts(fashion_mini: TrainTest) -> None:
    train, test = (
        {bytes(image) for image in part.images_NCHW.numpy()}
        for part in (fashion_mini.train, fashion_mini.test)
    )
    assert not train & test


def test_its_file_is_the_known_one_and_small() -> None:
    content = (_FOLDER / "fashion-mini.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == _SHA256
    assert len(content) < 6_000_000


def test_its_licence_lies_beside_it() -> None:
    text = (_FOLDER / "LICENSE-fashion-mnist").read_text()
    assert "MIT" in text
    assert "Zalando" in text
