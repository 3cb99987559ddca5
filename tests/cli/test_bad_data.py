"""Bad data, and models that do not fit it: refused before training, nothing left behind."""

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Refused
from tests.cli.test_train import TINY, write_stripes


def picture(path: Path, side: int = 12, shade: int = 0) -> None:
    """Write a grey picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(shade).integers(0, 256, (side, side), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def pictures(root: Path, *folders: str, suffix: str = "png", count: int = 12) -> None:
    """Write some pictures into each of some folders."""
    for folder in folders:
        for number in range(count):
            picture(root / folder / f"{number}.{suffix}", shade=number)


def save(path: Path, **arrays: Any) -> None:
    """Write an .npz file of stripes, with some of its arrays replaced or, by None, left out."""
    write_stripes(path)
    with np.load(path) as archive:
        known = dict(archive.items())
    kept = {key: value for key, value in {**known, **arrays}.items() if value is not None}
    np.savez(path, **kept)


def _folder_empty(path: Path) -> str:
    (path / "data").mkdir()
    return "data"


def _folder_without_classes(path: Path) -> str:
    for number in range(4):
        picture(path / "data" / f"{number}.png")
    return "data"


def _folder_one_class(path: Path) -> str:
    pictures(path / "data", "cat")
    return "data"


def _folder_empty_class(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "owl").mkdir()
    return "data"


def _folder_test_class_unknown(path: Path) -> str:
    pictures(path / "data", "train/cat", "train/dog", "test/cat", "test/owl")
    return "data"


def _folder_test_only(path: Path) -> str:
    pictures(path / "data", "test/cat", "test/dog", "more/cat")
    return "data"


def _folder_sizes_differ(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    picture(path / "data" / "dog" / "large.png", side=16)
    return "data"


def _folder_one_picture_each(path: Path) -> str:
    pictures(path / "data", "cat", "dog", count=1)
    return "data"


def _folder_truncated_jpeg(path: Path) -> str:
    pictures(path / "data", "cat", "dog", suffix="jpg")
    file = path / "data" / "dog" / "3.jpg"
    file.write_bytes(file.read_bytes()[:200])
    return "data"


def folder_text_as_png(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "cat" / "3.png").write_text("no picture")
    return "data"


def _folder_empty_file(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "cat" / "3.png").write_bytes(b"")
    return "data"


def _tar(path: Path, name: str) -> Path:
    pictures(path / "source", "cat", "dog")
    with tarfile.open(path / "plain", "w") as archive:
        archive.add(path / "source", ".")
    content = (path / "plain").read_bytes()
    (path / "plain").unlink()
    (path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    shutil.rmtree(path / "source")
    return path / name


def _tar_gz_cut(path: Path) -> str:
    file = _tar(path, "data.tar.gz")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file.name


def _tar_gz_flipped(path: Path) -> str:
    file = _tar(path, "data.tar.gz")
    content = bytearray(file.read_bytes())
    content[10:14] = b"\xff" * 4  # a kind of block that gzip does not know
    file.write_bytes(content)
    return file.name


def _tar_cut(path: Path) -> str:
    file = _tar(path, "data.tar")
    file.write_bytes(file.read_bytes()[:9000])
    return file.name


def _tar_header_damaged(path: Path) -> str:
    file = _tar(path, "data.tar")
    with tarfile.open(file) as archive:
        damaged = archive.getmembers()[-3].offset
    content = bytearray(file.read_bytes())
    content[damaged] ^= 1  # its checksum no longer fits; what follows would be lost in silence
    file.write_bytes(content)
    return file.name


def _tar_is_text(path: Path) -> str:
    (path / "data.tar").write_text("I am a text, not an archive.\n" * 100)
    return "data.tar"


def _tar_empty(path: Path) -> str:
    (path / "data.tar").write_bytes(b"")
    return "data.tar"


def _unknown_kind(path: Path) -> str:
    (path / "data.csv").write_text("1,2\n")
    return "data.csv"


def _npz_is_text(path: Path) -> str:
    (path / "data.npz").write_text("I am a text.")
    return "data.npz"


def _npz_empty(path: Path) -> str:
    (path / "data.npz").write_bytes(b"")
    return "data.npz"


def _npz_cut(path: Path) -> str:
    save(path / "data.npz")
    content = (path / "data.npz").read_bytes()
    (path / "data.npz").write_bytes(content[: len(content) // 2])
    return "data.npz"


def _npz_is_folder(path: Path) -> str:
    (path / "data.npz").mkdir()
    return "data.npz"


def _npz_is_one_array(path: Path) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((4, 12, 12), np.uint8))
    (path / "data.npz").write_bytes(buffer.getvalue())
    return "data.npz"


def arrays(**values: Any) -> Callable[[Path], str]:
    """Return a maker of an .npz file with some arrays replaced or left out."""

    def prepare(path: Path) -> str:
        save(path / "data.npz", **values)
        return "data.npz"

    return prepare


LABELS = np.arange(64) % 2
FLOATS = np.zeros((64, 1, 12, 12), np.float32)
SINGLE_NAN = np.where(np.arange(64 * 144).reshape(64, 1, 12, 12) == 7, np.nan, 0.0)

DATA: list[Any] = [
    ("folder empty", _folder_empty, ("data", "no images"), 2),
    ("folder without classes", _folder_without_classes, ("data", "class"), 2),
    ("folder of one class", _folder_one_class, ("fewer than two class folders", "cat"), 2),
    ("class empty", _folder_empty_class, ("a class folder has no images", "owl", "Fill it"), 2),
    ("test class unknown", _folder_test_class_unknown, ("classes that the training", "owl"), 2),
    ("test part only", _folder_test_only, ("no 'train' folder", "test"), 2),
    ("sizes differ", _folder_sizes_differ, ("12x12", "16x16", "--image-size"), 2),
    ("one picture each", _folder_one_picture_each, ("one sample only",), 2),
    ("jpeg truncated", _folder_truncated_jpeg, ("dog/3.jpg", "1 bad", "--max-bad-samples"), 1),
    ("png is text", folder_text_as_png, ("cat/3.png", "1 bad", "--max-bad-samples"), 1),
    ("png empty", _folder_empty_file, ("cat/3.png", "1 bad", "--max-bad-samples"), 1),
    ("tar.gz cut", _tar_gz_cut, ("data.tar.gz", "damaged or no tar archive"), 2),
    ("tar.gz flipped", _tar_gz_flipped, ("data.tar.gz", "damaged or no tar archive"), 2),
    ("tar cut", _tar_cut, ("data.tar", "damaged or no tar archive"), 2),
    ("tar header damaged", _tar_header_damaged, ("data.tar", "damaged or no tar archive"), 2),
    ("tar is text", _tar_is_text, ("data.tar", "damaged or no tar archive"), 2),
    ("tar empty", _tar_empty, ("data.tar",), 2),
    ("unknown kind", _unknown_kind, ("no known kind", "'data.csv'", ".npz"), 2),
    ("npz is text", _npz_is_text, ("data.npz", "cannot be read as .npz"), 2),
    ("npz empty", _npz_empty, ("data.npz", "cannot be read as .npz"), 2),
    ("npz cut", _npz_cut, ("data.npz", "cannot be read as .npz"), 2),
    ("npz is folder", _npz_is_folder, ("data.npz",), 2),
    ("npz is one array", _npz_is_one_array, ("data.npz", "one array"), 2),
    ("npz pickled", arrays(labels=LABELS.astype(object)), ("data.npz", "pickle"), 2),
    ("npz without labels", arrays(labels=None), ("no training part", "labels"), 2),
    ("npz without images", arrays(images=None), ("no training part", "images"), 2),
    ("labels too few", arrays(labels=LABELS[:9]), ("differ in number", "64 and 9"), 2),
    ("labels out of range", arrays(classes=np.array(["a"])), ("label is out of range", "1"), 2),
    ("labels negative", arrays(labels=LABELS - 1), ("a label is negative", "-1"), 2),
    ("labels floats", arrays(labels=LABELS * 0.5), ("labels must be whole numbers", "float"), 2),
    ("labels words", arrays(labels=np.array(["a", "b"] * 32)), ("data.npz",), 2),
    ("test label unknown", arrays(x_test=FLOATS, y_test=LABELS + 1), ("out of range", "2"), 2),
    ("images flat", arrays(images=np.zeros((64, 144), np.uint8)), ("3 or 4 dim", "144"), 2),
    ("images of 7 channels", arrays(images=np.zeros((64, 7, 5, 9))), ("1 or 3 channels", "7"), 2),
    ("images whole", arrays(images=np.zeros((64, 12, 12), np.int32)), ("uint8 or floats",), 2),
    ("images words", arrays(images=np.full((64, 12, 12), "x")), ("data.npz",), 2),
    ("images nan", arrays(images=SINGLE_NAN), ("data.npz", "NaN"), 2),
    ("images none", arrays(images=FLOATS[:0], labels=LABELS[:0]), ("no samples",), 2),
    (
        "test images of another size",
        arrays(x_test=np.zeros((4, 9, 9), np.uint8), y_test=LABELS[:4]),
        ("differ in shape", "9"),
        2,
    ),
]


@pytest.mark.parametrize(
    ("prepare", "words", "code"), [case[1:] for case in DATA], ids=[case[0] for case in DATA]
)
@pytest.mark.parametrize("out", [(), ("--out", "deep/run")], ids=["runs", "out"])
def test_bad_data(
    refused: Refused,
    tmp_path: Path,
    prepare: Callable[[Path], str],
    words: tuple[str, ...],
    code: int,
    out: tuple[str, ...],
) -> None:
    data = prepare(tmp_path)
    refused("train", *TINY, "--data", data, *out, words=words, code=code)


def test_empty_folder_given_as_out_is_still_there_after_a_refusal(
    refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    refused("train", "--data", "none", "--out", "mine", words=("unknown data set",))
    assert (tmp_path / "mine").is_dir()


def test_pickled_objects_are_not_executed(refused: Refused, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "data.npz").write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    refused("train", "--data", "data.npz", words=("data.npz", "cannot be read"))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", 65), ("'batch' is larger", "got 65", "at most 52")),
        (("--crop-padding", 12, "--augment", "crop"), ("'crop_padding'", "12", "below 12")),
        (("--cutout", 12), ("'cutout' is as large", "12", "below 12")),
        (("--model", "vgg16"), ("too small for vgg16", "(1, 12, 12)", "32x32")),
        (("--model", "alexnet"), ("too small for alexnet", "(1, 12, 12)")),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_data(
    refused: Refused, tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    write_stripes(tmp_path / "data.npz")
    kept = [part for pair in zip(TINY[::2], TINY[1::2], strict=True) for part in pair]
    for name in options[::2]:
        if name in kept:
            place = kept.index(name)
            del kept[place : place + 2]
    refused("train", *kept, "--data", "data.npz", *options, words=words)


MODULES = [
    ("attribute missing", "def makes(): pass", ("'mine' has no 'make'", "'makes'?")),
    ("not callable", "make = 5", ("'mine:make' is not callable", "int")),
    ("syntax error", "def make(:", ("'mine:make'", "SyntaxError")),
    ("fails on import", "raise OSError('no licence')", ("'mine:make'", "OSError: no licence")),
    ("exits on import", "raise SystemExit(7)", ("'mine:make'", "SystemExit")),
    ("fails", "def make(): return 1 / 0", ("'mine:make' failed", "ZeroDivisionError")),
    ("fails at length", "def make(): raise ValueError('a\\nb')", ("'mine:make'", "ValueError: a")),
]
MODELS = [
    ("no module", "def make(): return 5", ("must return an nn.Module", "int")),
    ("no weights", "make = lambda: nn.Flatten()", ("'mine:make' has nothing to train",)),
    ("few outputs", "make = lambda: net(1)", ("wrong output", "(2, 1)", "2 classes")),
    ("no vector", "make = lambda: nn.Conv2d(1, 2, 3)", ("wrong output", "(2, 2, 10, 10)")),
    ("no tensor", "make = lambda: Pair()", ("'mine:make'", "cannot take images")),
    ("another input", "make = lambda: nn.Conv2d(5, 2, 3)", ("(1, 12, 12)", "channels")),
    ("wants more", "def make(depth): return net(2)", ("'mine:make' failed", "depth")),
]
DATASETS = [
    ("one part", "make = lambda: [1]", ("must return two data sets", "list")),
    ("no data", "make = lambda: (5, 6)", ("the training data is of no known kind", "int")),
    ("no items", "make = lambda: ([], [])", ("training data has no samples",)),
    ("items fail", "make = lambda: ([(X, 0), None], [])", ("sample 1 of the training data",)),
    ("items differ", "make = lambda: ([(X, 0), (X[1:], 1)], [])", ("different sizes", "11")),
    ("items of words", "make = lambda: ([('x', 0), ('y', 1)], [])", ("training",)),
    ("labels differ", "make = lambda: (both, (A, L + 1))", ("not those of the training part",)),
]
MODEL_HEAD = """
from torch import nn
def net(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(144, outputs))
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(2)
    def forward(self, x): return self.net(x), x
"""
DATA_HEAD = """
import numpy as np
X = np.zeros((12, 12), np.uint8)
A, L = np.zeros((64, 12, 12), np.uint8), np.arange(64) % 2
both = (A, L)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [(text, words) for _, text, words in MODULES + MODELS],
    ids=[case[0] for case in MODULES + MODELS],
)
def test_user_model_that_is_of_no_use(
    refused: Refused, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "mine.py").write_text(MODEL_HEAD + text)
    options = [*TINY[:4], *TINY[6:], "--data", "data.npz"]
    refused("train", *options, "--model", "mine:make", words=words)


@pytest.mark.parametrize(
    ("text", "words"),
    [(text, words) for _, text, words in MODULES + DATASETS],
    ids=[case[0] for case in MODULES + DATASETS],
)
def test_user_data_that_is_of_no_use(
    refused: Refused, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(DATA_HEAD + text)
    refused("train", *TINY, "--data", "mine:make", words=words)
