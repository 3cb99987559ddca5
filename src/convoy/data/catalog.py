"""From what the user typed after --data to a source of images."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from convoy.config import Config
from convoy.data.sources.archive import ARCHIVE_SUFFIXES, FolderFiles, ImageFiles, TarFiles
from convoy.data.sources.cifar import cifar_source, find_cifar_folder
from convoy.data.sources.folder import folder_source
from convoy.data.sources.idx import DIGITS, FASHION_CLASSES, find_idx_files, idx_source
from convoy.data.sources.npz import npz_source
from convoy.data.sources.source import Source
from convoy.data.sources.user import user_source
from convoy.errors import ConfigError, DataError, unknown_name
from convoy.files import user_path
from convoy.registry import is_user_target

_DEBIAN_DATASETS = Path("/usr/share/datasets")  # where Debian's dataset-* packages install


@dataclass(frozen=True, slots=True)
class NamedSet:
    """A well-known data set: what it is, and how to look for it in some folders."""

    description: str
    find: Callable[[list[Path]], Source | None]
    subfolders: tuple[str, ...] = ()
    usual_places: tuple[Path, ...] = ()


def _find_fashion_mini(_: list[Path]) -> Source:
    path = Path(str(files("convoy.data").joinpath("embedded/fashion-mini.npz")))
    return npz_source("fashion-mini", path, augment="flip")


def _find_fashion_mnist(folders: list[Path]) -> Source | None:
    found = find_idx_files(folders)
    return idx_source("fashion-mnist", found, FASHION_CLASSES, "flip") if found else None


def _find_mnist(folders: list[Path]) -> Source | None:
    found = find_idx_files(folders)
    return idx_source("mnist", found, DIGITS, "crop") if found else None


def _find_cifar10(folders: list[Path]) -> Source | None:
    folder = find_cifar_folder(folders)
    return cifar_source("cifar10", folder) if folder else None


NAMED_SETS = {
    "fashion-mini": NamedSet(
        "12,000 images of Fashion-MNIST, shipped with Convoy: needs no download",
        _find_fashion_mini,
    ),
    "fashion-mnist": NamedSet(
        "70,000 grey images of clothes, 28x28 (IDX files)",
        _find_fashion_mnist,
        subfolders=("fashion-mnist", "FashionMNIST/raw"),
        usual_places=(_DEBIAN_DATASETS / "fashion-mnist",),
    ),
    "mnist": NamedSet(
        "70,000 handwritten digits, 28x28 (IDX files)",
        _find_mnist,
        subfolders=("mnist", "MNIST/raw"),
        usual_places=(_DEBIAN_DATASETS / "mnist",),
    ),
    "cifar10": NamedSet(
        "60,000 colour images, 32x32 (CIFAR's binary files)",
        _find_cifar10,
        subfolders=("cifar10", "cifar-10-batches-bin"),
    ),
}


def find_source(config: Config) -> Source:
    """Return the source that a config's `data` names.

    Raises:
        ConfigError: no such name, path or callable.
        DataError: the files of a named data set are not there.
    """
    if config.data in NAMED_SETS:
        return _find_named(config.data, config.data_dir)
    path = user_path(config.data)
    if _exists(path):
        return _find_at(path, config)
    if is_user_target(config.data):
        return user_source(config.data)
    raise unknown_name(
        "data set", config.data, NAMED_SETS, or_else="an existing path, MODULE:CALLABLE"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long to be one
        return False


def _find_named(name: str, data_dir: str | None) -> Source:
    named = NAMED_SETS[name]
    roots = [user_path(data_dir)] if data_dir else []
    if roots and not (_exists(roots[0]) and roots[0].is_dir()):
        raise DataError("'data_dir' is no folder", got=data_dir)
    folders = [place for root in roots for place in (root, *(root / s for s in named.subfolders))]
    source = named.find([*folders, *named.usual_places])
    if source is None:
        looked = ", ".join(str(place) for place in (*folders, *named.usual_places))
        raise DataError(
            f"the files of '{name}' were not found",
            hint=f"Looked in: {looked or 'nowhere'}. Give --data-dir FOLDER, "
            f"or --data fashion-mini, which needs no files.",
        )
    return source


def _find_at(path: Path, config: Config) -> Source:
    if path.suffix == ".npz" and path.is_file():
        return npz_source(config.data, path)
    if path.is_dir():
        files_below: ImageFiles = FolderFiles(path)
    elif path.name.lower().endswith(ARCHIVE_SUFFIXES):
        files_below = TarFiles(path)
    else:
        raise ConfigError(
            "the data path is of no known kind",
            got=config.data,
            allowed="a folder of class folders, a .tar, .tar.gz or .tgz of one, or an .npz file",
        )
    return folder_source(
        config.data,
        files_below,
        image_size=config.image_size,
        max_bad_samples=config.max_bad_samples,
    )
