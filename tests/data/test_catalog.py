"""What is typed after --data leads to the right source, or to a helpful refusal."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from convoy.config import Config
from convoy.data.catalog import NAMED_SETS, find_source
from convoy.errors import ConfigError, DataError
from convoy.tracking import untracked
from tests.data.test_folder import write_classes


def test_the_default_is_the_set_that_needs_no_files() -> None:
    source = find_source(Config())
    assert source.name == "fashion-mini"
    assert source.augment == "flip"
    assert all(path.is_file() for path in source.files)


def test_every_named_set_is_described() -> None:
    assert set(NAMED_SETS) == {"fashion-mini", "fashion-mnist", "mnist", "cifar10"}
    assert all(named.description for named in NAMED_SETS.values())


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="unknown data set; got 'cifar'") as caught:
        find_source(Config(data="cifar"))
    message = str(caught.value)
    assert "Did you mean 'cifar10'?" in message
    assert "MODULE:CALLABLE" in message
    assert all(name in message for name in NAMED_SETS)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_data_dir_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="'data_dir' is no folder"):
        find_source(Config(data=name, data_dir=str(tmp_path / "absent")))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_named_set_without_its_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"files of '{name}' were not found") as caught:
        find_source(Config(data=name, data_dir=str(tmp_path)))
    assert f"Looked in: {tmp_path}" in str(caught.value)


def test_a_named_set_without_any_folder_was_looked_for_nowhere() -> None:
    with pytest.raises(DataError, match="Looked in: nowhere"):
        find_source(Config(data="cifar10"))


def test_the_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_classes(tmp_path / "root")
    assert len(find_source(Config(data="~/root")).files) == 8
    with pytest.raises(DataError, match=f"Looked in: {tmp_path}"):
        find_source(Config(data="cifar10", data_dir="~"))


def test_a_path_leads_to_a_source_of_its_kind(tmp_path: Path) -> None:
    write_classes(tmp_path / "root", 2)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "root", arcname=".")
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 3, 3), np.uint8), labels=np.arange(4) % 2)
    counts = {}
    for name in ("root", "x.tar", "x.npz"):
        source = find_source(Config(data=name))
        counts[name] = (len(source.files), len(source.decode(untracked).train), source.augment)
    assert counts == {
        "root": (4, 4, "crop+flip"),
        "x.tar": (1, 4, "crop+flip"),
        "x.npz": (1, 4, "none"),
    }


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"no known kind; got 'data\.csv'.*\.npz"):
        find_source(Config(data="data.csv"))


def test_a_users_callable_is_imported_only_when_decoded() -> None:
    source = find_source(Config(data="catalog_absent:make"))
    assert source.fingerprint(untracked) is None
    with pytest.raises(ConfigError, match="cannot be imported"):
        source.decode(untracked)


def test_an_existing_path_goes_before_a_callable(tmp_path: Path) -> None:
    write_classes(tmp_path / "a:b", 2)
    assert len(find_source(Config(data="a:b")).files) == 4


@pytest.mark.parametrize("option", ["image_size", "max_bad_samples"])
def test_options_that_change_the_decoding_change_the_fingerprint(
    tmp_path: Path, option: str
) -> None:
    write_classes(tmp_path / "root", 2)
    plain = find_source(Config(data="root")).fingerprint(untracked)
    changed = find_source(Config(data="root").replaced({option: 4})).fingerprint(untracked)
    assert plain is not None
    assert plain != changed
