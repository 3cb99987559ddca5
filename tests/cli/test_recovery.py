"""Damage that Convoy mends or works around by itself, saying so where it matters."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Convoy, Refused, snapshot
from tests.cli.test_bad_data import (
    FLOATS,
    LABELS,
    folder_text_as_png,
    picture,
    pictures,
    save,
)
from tests.cli.test_train import TINY, write_stripes
from tests.conftest import Outcome


def _cut_images(folder: Path) -> None:
    content = (folder / "train-images.npy").read_bytes()
    (folder / "train-images.npy").write_bytes(content[:-1])


def _flip_labels(folder: Path) -> None:
    content = bytearray((folder / "train-labels.npy").read_bytes())
    content[-8] ^= 1
    (folder / "train-labels.npy").write_bytes(content)


def _lose_labels(folder: Path) -> None:
    (folder / "train-labels.npy").unlink()


def _lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def changed_manifest(**changes: object) -> Callable[[Path], None]:
    """Return a damage that gives a cache's manifest other values."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _cut_images,
        _flip_labels,
        _lose_labels,
        _lose_manifest,
        _break_manifest,
        pytest.param(changed_manifest(files=None), id="files of another type"),
        pytest.param(changed_manifest(statistics=[[0.0], [9.0]]), id="other statistics"),
        pytest.param(changed_manifest(classes=["a", "b", "c"]), id="other classes"),
        pytest.param(changed_manifest(format="older"), id="another format"),
    ],
)
def test_damaged_image_cache_is_rebuilt_in_silence(
    convoy: Convoy, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write_stripes(tmp_path / "data.npz")
    command = ("train", *TINY, "--data", "data.npz", "--cache-dir", "cache", "--json", "--quiet")
    first = convoy(*command)
    (folder,) = (tmp_path / "cache").iterdir()
    whole = snapshot(folder)
    damage(folder)
    assert snapshot(folder) != whole
    second = convoy(*command)
    assert (second.code, second.err) == (0, "")
    assert snapshot(folder) == whole
    keys = ("test_accuracy", "train_loss")
    assert [json.loads(second.out)[key] for key in keys] == [
        json.loads(first.out)[key] for key in keys
    ]


def test_cache_that_cannot_be_written_costs_a_warning_only(
    convoy: Convoy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "file").write_text("x")
    outcome = convoy(
        "train", *TINY, "--data", "data.npz", "--cache-dir", "file", "--json", "--quiet"
    )
    assert outcome.code == 0
    assert "decoded images could not be cached" in caplog.text
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", [".ipynb_checkpoints/0.png", "cat/.hidden/0.png", "loose.png"])
def test_pictures_that_are_in_no_class_break_nothing(
    convoy: Convoy, tmp_path: Path, name: str
) -> None:
    pictures(tmp_path / "data", "cat", "dog")
    picture(tmp_path / "data" / name)
    outcome = convoy("train", *TINY, "--data", "data", "--quiet")
    assert outcome == Outcome(0, "", "")


@pytest.mark.parametrize("name", ["images", "labels"])
def test_arrays_of_another_byte_order_are_read(convoy: Convoy, tmp_path: Path, name: str) -> None:
    swapped = {"images": FLOATS.astype(">f4"), "labels": LABELS.astype(">i8")}
    save(tmp_path / "data.npz", **{name: swapped[name]})
    outcome = convoy("train", *TINY, "--data", "data.npz", "--quiet")
    assert outcome.code == 0


def test_picture_whose_name_is_no_utf8_is_learned_from(convoy: Convoy, tmp_path: Path) -> None:
    pictures(tmp_path / "data", "cat", "dog")
    picture(tmp_path / "data" / "cat" / "x.png")
    (tmp_path / "data" / "cat" / "x.png").rename(tmp_path / "data" / "cat" / "caf\udce9.png")
    outcome = convoy("train", *TINY, "--data", "data", "--json", "--quiet")
    assert outcome.code == 0


def test_data_whose_name_is_no_utf8_is_refused(refused: Refused, tmp_path: Path) -> None:
    write_stripes(tmp_path / "x.npz").rename(tmp_path / "caf\udce9.npz")
    refused("train", *TINY, "--data", "caf\udce9.npz", words=("'data'", "cannot be printed"))


def test_bad_pictures_up_to_the_limit_are_left_out_and_named(
    convoy: Convoy, tmp_path: Path
) -> None:
    data = folder_text_as_png(tmp_path)
    outcome = convoy("train", *TINY, "--data", data, "--max-bad-samples", 1, "--json")
    assert outcome.code == 0
    assert "warning: left out an image: cat/3.png" in outcome.err
