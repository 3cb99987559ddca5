"""The image files below a folder or inside a tar archive, as one kind of thing."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, Self, cast

from convoy.errors import DataError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz")


class ImageFiles(Protocol):
    """Image files by their relative path, read in whatever order is cheap."""

    root: Path

    def folders(self) -> list[PurePosixPath]:
        """Return every folder's relative path, empty ones too."""
        ...

    def images(self) -> list[PurePosixPath]:
        """Return every image's relative path, sorted."""
        ...

    def parts(self) -> list[Path]:
        """Return the files on disk that the content is made of."""
        ...

    def read(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        """Yield every image file with its content."""
        ...


def is_image(path: PurePosixPath) -> bool:
    """Tell by its name whether a file is an image; what is hidden is none."""
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in IMAGE_SUFFIXES and not hidden


class FolderFiles:
    """The image files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self) -> list[PurePosixPath]:
        """Return every folder's relative path, empty ones too."""
        return sorted(self._relative(p) for p in self.root.rglob("*") if p.is_dir())

    def images(self) -> list[PurePosixPath]:
        """Return every image's relative path, sorted."""
        found = (self._relative(p) for p in self.root.rglob("*") if p.is_file())
        return sorted(path for path in found if is_image(path))

    def parts(self) -> list[Path]:
        """Return the files on disk that the content is made of."""
        return [self.root / path for path in self.images()]

    def read(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        """Yield every image file with its content."""
        for path in self.images():
            yield path, (self.root / path).read_bytes()

    def _relative(self, path: Path) -> PurePosixPath:
        return PurePosixPath(path.relative_to(self.root).as_posix())


class _StrictHeader(tarfile.TarInfo):
    """Refuses a damaged or missing header, which tarfile takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header; only a block of zeros may end the archive."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"damaged or cut short ({error})") from error


class TarFiles:
    """The image files inside a tar archive; nothing is ever unpacked to disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: tuple[list[PurePosixPath], list[PurePosixPath]] | None = None

    def folders(self) -> list[PurePosixPath]:
        """Return every folder's relative path, empty ones too."""
        return self._listing()[0]

    def images(self) -> list[PurePosixPath]:
        """Return every image's relative path, sorted."""
        return self._listing()[1]

    def parts(self) -> list[Path]:
        """Return the archive itself."""
        return [self.root]

    def read(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        """Yield every image file with its content, in the archive's order."""
        for member, archive in self._members():
            path = PurePosixPath(member.name)
            if is_image(path) and (member.islnk() or member.issym()):
                raise DataError(f"{self.root}: {path} is a link, and links are not followed")
            if member.isfile() and is_image(path):
                file = archive.extractfile(member)
                assert file is not None
                yield path, file.read()

    def _listing(self) -> tuple[list[PurePosixPath], list[PurePosixPath]]:
        if self._names is None:
            folders: set[PurePosixPath] = set()
            images: list[PurePosixPath] = []
            for member, _ in self._members():
                path = PurePosixPath(member.name)
                if member.isdir():
                    folders.add(path)
                elif member.isfile() and is_image(path):
                    images.append(path)
                    folders.update(path.parents)
            self._names = (sorted(folders), sorted(images))
        return self._names

    def _open(self) -> IO[bytes]:
        with self.root.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        return cast(IO[bytes], gzip.open(self.root)) if zipped else self.root.open("rb")

    def _members(self) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
        try:
            with (
                self._open() as stream,
                # "r|" streams: going back and forth in a gzip would unpack it again each time.
                tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader) as archive,
            ):
                for member in archive:
                    yield member, archive
                while stream.read(1 << 20):
                    pass  # the checksum of a gzip is at its very end
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise DataError(f"{self.root} is damaged or no tar archive: {error}") from error
