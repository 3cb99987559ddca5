"""A tar archive gives the very pixels of the folder it was made of."""

import tarfile
from pathlib import Path

import pytest
import torch

from convoy.data.images import TrainTest
from convoy.data.sources.archive import FolderFiles, TarFiles
from convoy.errors import BadSampleError, DataError
from tests.data.test_folder import load_path, write_classes, write_image


def _pack(root: Path, name: str, *, top: str = ".") -> Path:
    archive = root.parent / name
    with tarfile.open(archive, "w" if name.endswith(".tar") else "w:gz") as tar:
        tar.add(root, arcname=top)
    return archive


def _write_parts(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write_classes(root / "train", 3)
    write_classes(root / "val", 2, first=100)
    return root


def _load(path: Path, **options: object) -> TrainTest:
    return load_path(path, path.parent / "cache", **options)


def _assert_same(a: TrainTest, b: TrainTest) -> None:
    for one, other in ((a.train, b.train), (a.test, b.test)):
        assert torch.equal(one.images_NCHW, other.images_NCHW)
        assert torch.equal(one.labels, other.labels)
        assert one.classes == other.classes


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "X.TAR.GZ"])
@pytest.mark.parametrize("top", [".", "dataset"])
def test_an_archive_equals_its_folder(tmp_path: Path, name: str, top: str) -> None:
    root = _write_parts(tmp_path)
    _assert_same(_load(_pack(root, name, top=top)), _load(root))


def test_an_archive_without_parts_is_split_as_its_folder(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "root", 6)
    _assert_same(_load(_pack(root, "x.tar.gz"), seed=3), _load(root, seed=3))


def test_the_order_inside_the_archive_does_not_matter(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    archive = tmp_path / "x.tar"
    with tarfile.open(archive, "w") as tar:
        for path in sorted(root.rglob("*.png"), reverse=True):
            tar.add(path, arcname=path.relative_to(root))
    _assert_same(_load(archive), _load(root))


def test_hidden_files_and_other_files_are_left_out(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    expected = _load(root)
    (root / "train" / "cat" / "._0.png").write_bytes(b"no image")
    (root / "train" / "cat" / "notes.txt").write_text("none")
    _assert_same(_load(_pack(root, "x.tar")), expected)


@pytest.mark.parametrize("hard", [False, True])
def test_a_link_in_an_archive_is_refused_not_left_out(tmp_path: Path, hard: bool) -> None:
    root = _write_parts(tmp_path)
    link = root / "train" / "cat" / "link.png"
    if hard:
        link.hardlink_to(root / "train" / "cat" / "0.png")
    else:
        link.symlink_to("0.png")
    with pytest.raises(DataError, match="is a link"):
        _load(_pack(root, "x.tar"))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_bad_header_is_not_taken_for_the_end_of_the_archive(tmp_path: Path, damage: str) -> None:
    archive = _pack(_write_parts(tmp_path), "x.tar")
    with tarfile.open(archive) as opened:
        at = [member for member in opened if member.name.endswith(".png")][3].offset
    raw = bytearray(archive.read_bytes())
    if damage == "cut":
        del raw[at + 100 :]
    else:
        raw[at + 1] ^= 1
    archive.write_bytes(raw)
    with pytest.raises(DataError, match=r"damaged"):
        _load(archive)


def test_a_gzip_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    archive = _pack(_write_parts(tmp_path), "x.tar.gz")
    raw = bytearray(archive.read_bytes())
    raw[-6] ^= 1
    archive.write_bytes(raw)
    with pytest.raises(DataError, match=r"(?i)crc"):
        _load(archive)


def test_nothing_is_unpacked_to_disk(tmp_path: Path) -> None:
    archive = _pack(_write_parts(tmp_path / "a"), "x.tar.gz")
    alone = tmp_path / "b" / "x.tar.gz"
    alone.parent.mkdir()
    archive.rename(alone)
    _load(alone)
    assert not list(alone.parent.rglob("*.png"))


def test_folder_and_archive_list_the_same_names(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    (root / "empty").mkdir()
    folder, archive = FolderFiles(root), TarFiles(_pack(root, "x.tar"))
    assert archive.images() == folder.images()
    assert set(archive.folders()) >= set(folder.folders())
    assert dict(archive.read()) == dict(folder.read())
    assert archive.parts() == [tmp_path / "x.tar"]
    assert folder.parts() == [root / path for path in folder.images()]


def test_an_empty_class_folder_in_an_archive_is_refused(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    (root / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=r"a class folder has no images; got \['emu'\]"):
        _load(_pack(root, "x.tar"))


def test_an_unreadable_image_in_an_archive_counts(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    bad = root / "train" / "dog" / "1.png"
    bad.write_bytes(bad.read_bytes()[:-30])
    archive = _pack(root, "x.tar.gz")
    with pytest.raises(BadSampleError, match=r"train/dog/1\.png cannot be read"):
        _load(archive)
    data = _load(archive, max_bad_samples=1)
    assert len(data.train) == 5
    assert len(data.skipped) == 1


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
@pytest.mark.parametrize("content", [b"", b"this is no archive" * 100])
def test_what_is_no_archive_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="is damaged or no tar archive"):
        _load(tmp_path / name)


def test_an_archive_cut_short_inside_an_image_is_refused(tmp_path: Path) -> None:
    root = _write_parts(tmp_path)
    write_image(root / "train" / "dog" / "large.png", 0, width=100, height=100)
    archive = _pack(root, "x.tar", top="top")
    with tarfile.open(archive) as tar:
        place = tar.getmember("top/train/dog/large.png").offset_data
    archive.write_bytes(archive.read_bytes()[: place + 5000])
    with pytest.raises(DataError, match="is damaged or no tar archive: unexpected end of data"):
        _load(archive)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_tar_gz_is_refused(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "root"
    for number in range(6):
        write_image(root / "ab"[number % 2] / f"{number}.png", number, width=60, height=60)
    archive = _pack(root, "x.tar.gz")
    content = bytearray(archive.read_bytes())
    half = len(content) // 2
    content[half : half + 50] = bytes(byte ^ 0xFF for byte in content[half : half + 50])
    whole = archive.read_bytes()
    archive.write_bytes(whole[:half] if damage == "truncated" else bytes(content))
    with pytest.raises((DataError, BadSampleError)):
        _load(archive)


def test_an_archive_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="has no images"):
        _load(_pack(tmp_path / "root", "x.tar"))
