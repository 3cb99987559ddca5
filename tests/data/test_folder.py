"""Folders of class folders: every usual layout is understood, every misfit refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.config import Config
from convoy.data.images import ImageSet, TrainTest
from convoy.data.load import load_data
from convoy.errors import BadSampleError, DataError

_CLASSES = ("cat", "dog")


def pixels_of(seed: int, *, colour: bool = False, width: int = 6, height: int = 5) -> np.ndarray:
    shape = (height, width, 3) if colour else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_image(path: Path, seed: int, **kind: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels_of(seed, **kind)).save(path)


def write_classes(root: Path, count: int = 4, *, first: int = 0, **kind: Any) -> Path:
    """Write `count` images for each class; image i of class c is made from seed first+10*c+i."""
    for number, name in enumerate(_CLASSES):
        for i in range(count):
            write_image(root / name / f"{i}.png", first + 10 * number + i, **kind)
    return root


def load_path(path: Path, cache: Path, **options: Any) -> TrainTest:
    return load_data(Config(data=str(path), cache_dir=str(cache), **options))


def _load(path: Path, **options: Any) -> TrainTest:
    return load_path(path, path.parent / "cache", **options)


def _assert_holds(images: ImageSet, seeds: list[int], **kind: Any) -> None:
    expected = np.stack([pixels_of(seed, **kind) for seed in seeds])
    if expected.ndim == 3:
        expected = expected[..., None]
    assert np.array_equal(images.images_NCHW.numpy(), expected.transpose(0, 3, 1, 2))


def _write_parts(root: Path, train: str = "train", test: str = "test", **kind: Any) -> Path:
    write_classes(root / train, 3, **kind)
    write_classes(root / test, 2, first=100, **kind)
    return root


@pytest.mark.parametrize("colour", [False, True])
def test_images_are_read_with_the_labels_of_their_folders(tmp_path: Path, colour: bool) -> None:
    data = _load(_write_parts(tmp_path / "root", colour=colour))
    _assert_holds(data.train, [0, 1, 2, 10, 11, 12], colour=colour)
    _assert_holds(data.test, [100, 101, 110, 111], colour=colour)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.train.classes == data.test.classes == _CLASSES
    assert data.augment == "crop+flip"
    assert data.skipped == ()


@pytest.mark.parametrize("train", ["train", "Train", "training"])
@pytest.mark.parametrize("test", ["test", "val", "valid", "validation", "VAL"])
def test_the_parts_go_by_any_of_their_names(tmp_path: Path, train: str, test: str) -> None:
    data = _load(_write_parts(tmp_path / "root", train, test))
    assert len(data.train) == 6
    _assert_holds(data.test, [100, 101, 110, 111])


def test_test_goes_before_val_where_there_are_both(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_classes(root / "val", 1, first=200)
    _assert_holds(_load(root).test, [100, 101, 110, 111])


def test_classes_without_parts_are_split(tmp_path: Path) -> None:
    data = _load(write_classes(tmp_path / "root"), test_fraction=0.25)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 1]


def test_a_train_folder_alone_is_split(tmp_path: Path) -> None:
    write_classes(tmp_path / "root" / "train")
    data = _load(tmp_path / "root", test_fraction=0.25)
    assert data.train.classes == _CLASSES
    assert len(data.train) == 6
    assert len(data.test) == 2


@pytest.mark.parametrize("top", ["only", "only/one"])
def test_a_single_top_folder_is_stepped_into(tmp_path: Path, top: str) -> None:
    _write_parts(tmp_path / "root" / top)
    data = _load(tmp_path / "root")
    assert data.train.classes == _CLASSES
    _assert_holds(data.train, [0, 1, 2, 10, 11, 12])


def test_images_nested_below_a_class_belong_to_it(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "cat" / "deep" / "er" / "x.png", 7)
    data = _load(root)
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    _assert_holds(data.train, [0, 1, 2, 7, 10, 11, 12])


def test_hidden_and_other_files_are_left_out(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    (root / "train" / "cat" / ".0.png").write_bytes(b"no image")
    (root / "train" / "cat" / "notes.txt").write_text("none")
    (root / "train" / ".empty").mkdir()
    (root / "README.md").write_text("none")
    assert len(_load(root).train) == 6


def test_suffixes_count_in_any_case(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "dog" / "x.PNG", 7)
    write_image(root / "train" / "dog" / "y.JPEG", 8)
    write_image(root / "train" / "dog" / "z.jpg", 9)
    assert len(_load(root).train) == 9


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "test" / "dog" / "x.png", 7, colour=True)
    data = _load(root)
    assert data.train.shape_CHW == data.test.shape_CHW == (3, 5, 6)
    grey = pixels_of(0)
    assert np.array_equal(data.train.images_NCHW[0].numpy(), np.stack([grey] * 3))
    assert np.array_equal(
        data.test.images_NCHW[-1].numpy(), pixels_of(7, colour=True).transpose(2, 0, 1)
    )


def test_images_of_different_sizes_are_refused_with_two_examples(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "dog" / "x.png", 7, width=8, height=9)
    with pytest.raises(DataError, match="differ in size") as caught:
        _load(root)
    assert "test/cat/0.png is 6x5" in str(caught.value)
    assert "train/dog/x.png is 8x9" in str(caught.value)
    assert "--image-size" in str(caught.value)


def test_an_image_size_makes_them_all_one_size(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "dog" / "x.png", 7, width=8, height=9)
    data = _load(root, image_size=4)
    assert data.train.shape_CHW == data.test.shape_CHW == (1, 4, 4)
    assert len(data.train) == 7


def test_an_image_of_the_asked_size_stays_as_it_is(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root", width=5)
    _assert_holds(_load(root, image_size=5).train, [0, 1, 2, 10, 11, 12], width=5)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_an_unreadable_image_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    root = _write_parts(tmp_path / "root")
    bad = root / "train" / "dog" / "1.png"
    contents = {"truncated": bad.read_bytes()[:-30], "text": b"no image", "empty": b""}
    bad.write_bytes(contents[damage])
    with pytest.raises(BadSampleError, match=r"train/dog/1\.png cannot be read") as caught:
        _load(root)
    assert "max_bad_samples = 0" in str(caught.value)


def test_as_many_unreadable_images_as_allowed_are_left_out_and_named(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    _cut_short(root / "train" / "dog" / "1.png")
    data = _load(root, max_bad_samples=1)
    _assert_holds(data.train, [0, 1, 2, 10, 12])
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert len(data.skipped) == 1
    assert data.skipped[0].startswith("train/dog/1.png: ")
    assert _load(root, max_bad_samples=1).skipped == data.skipped


def test_one_unreadable_image_more_than_allowed_is_refused(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    _cut_short(root / "train" / "dog" / "1.png")
    _cut_short(root / "test" / "cat" / "1.png")
    with pytest.raises(BadSampleError, match="got '2 bad images'; allowed: max_bad_samples = 1"):
        _load(root, max_bad_samples=1)
    assert len(_load(root, max_bad_samples=2).skipped) == 2


def test_a_part_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    for path in (root / "test").rglob("*.png"):
        _cut_short(path)
    with pytest.raises(DataError, match="no image of the test part could be read"):
        _load(root, max_bad_samples=9)


def test_an_oversized_image_counts_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "dog" / "x.png", 7, width=40, height=40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = _load(root, max_bad_samples=1)
    assert len(data.train) == 6
    assert data.skipped[0].startswith("train/dog/x.png")


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="has no images"):
        _load(tmp_path / "root")


def test_images_without_class_folders_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "root" / "x.png", 0)
    with pytest.raises(DataError, match=r"fewer than two class folders; got \[\]"):
        _load(tmp_path / "root")


@pytest.mark.parametrize("part", ["", "train"])
def test_a_single_class_is_refused(tmp_path: Path, part: str) -> None:
    write_image(tmp_path / "root" / part / "cat" / "x.png", 0)
    with pytest.raises(DataError, match=r"fewer than two class folders; got \['cat'\]"):
        _load(tmp_path / "root")


@pytest.mark.parametrize("part", ["", "train"])
def test_an_empty_class_is_refused(tmp_path: Path, part: str) -> None:
    root = tmp_path / "root"
    write_classes(root / part)
    (root / part / "emu").mkdir()
    with pytest.raises(DataError, match=r"a class folder has no images; got \['emu'\]"):
        _load(root)


def test_an_empty_test_part_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_classes(root / "train")
    (root / "test" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="the test part has no images"):
        _load(root)


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "test" / "emu" / "x.png", 0)
    with pytest.raises(DataError, match=r"classes that the training part lacks; got \['emu'\]"):
        _load(root)


def test_a_class_may_be_missing_from_the_test_part(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_classes(root / "train")
    write_image(root / "test" / "dog" / "x.png", 0)
    assert _load(root).test.labels.tolist() == [1]


def test_a_test_part_alone_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_classes(root / "test")
    write_classes(root / "other")
    with pytest.raises(DataError, match="has a test part but no 'train' folder"):
        _load(root)


def test_a_class_with_one_image_cannot_be_split(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "root")
    write_image(root / "emu" / "x.png", 0)
    with pytest.raises(DataError, match="class 2 has one sample only"):
        _load(root)


def test_moving_an_image_to_another_class_changes_the_digest(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root")
    write_image(root / "train" / "cat" / "x.png", 7)
    former = _load(root)
    (root / "train" / "cat" / "x.png").rename(root / "train" / "dog" / "x.png")
    moved = _load(root)
    assert former.digest != moved.digest
    assert moved.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_jpeg_is_decoded_as_pillow_decodes_it(tmp_path: Path) -> None:
    root = _write_parts(tmp_path / "root", colour=True)
    buffer = io.BytesIO()
    Image.fromarray(pixels_of(3, colour=True)).save(buffer, "JPEG")
    (root / "train" / "dog" / "x.jpg").write_bytes(buffer.getvalue())
    with Image.open(io.BytesIO(buffer.getvalue())) as image:
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(_load(root).train.images_NCHW[-1].numpy(), expected)


def test_sixteen_bits_of_grey_keep_their_upper_eight(tmp_path: Path) -> None:
    for name, values in (("a", (0, 20000)), ("b", (40000, 65535))):
        (tmp_path / "deep" / name).mkdir(parents=True)
        for value in values:
            image = Image.fromarray(np.full((4, 4), value, np.uint16))
            image.save(tmp_path / "deep" / name / f"{value}.png")
    data = load_path(tmp_path / "deep", tmp_path / "cache", test_fraction=0.5)
    levels = {int(image.unique()) for image in (*data.train.images_NCHW, *data.test.images_NCHW)}
    assert levels == {0, 78, 156, 255}
    assert data.train.shape_CHW == (1, 4, 4)
