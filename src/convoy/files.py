"""Files that are either whole or not there, whatever is killed when."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convoy.errors import ConfigError

_PARTIAL = ".partial-"

# Named places at which a test can kill the process, to prove that nothing is lost there.
FAILPOINTS = (
    "folder.before-fill",
    "folder.after-fill",
    "folder.before-rename",
    "folder.after-rename",
    "folder.before-remove",
    "file.before-rename",
    "service.mid-write",
    "service.before-rename",
    "service.after-rename",
)


_passes: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kill this very process here, if a test has armed this place; else do nothing.

    `CONVOY_FAILPOINT=folder.before-rename@3` arms the third pass through the place.
    """
    assert name in FAILPOINTS, name
    armed = os.environ.get("CONVOY_FAILPOINT")
    if armed is not None:
        _passes[name] += 1
        if armed == f"{name}@{_passes[name]}":
            os.kill(os.getpid(), signal.SIGKILL)


def _partial_name(path: Path) -> Path:
    return path.with_name(f"{_PARTIAL}{os.getpid()}-{path.name}")


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace a file's whole content: readers see the old or the new, never a part.

    A mode, where one is given, holds from the first byte on and whatever the umask says.
    """
    partial = _partial_name(path)
    try:
        if mode is not None:
            partial.touch(0o600)
            partial.chmod(mode)
        partial.write_text(text, encoding="utf-8")
        sync_file(partial)
        failpoint("file.before-rename")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a folder under a temporary name and give it its real name when it is complete.

    If there is such a folder already, it stays and ours is dropped, unless `replace` is set.
    """
    partial = _partial_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    failpoint("folder.before-fill")
    partial.mkdir()
    try:
        yield partial
        failpoint("folder.after-fill")
        for file in partial.iterdir():
            sync_file(file)
        sync_folder(partial)
        failpoint("folder.before-rename")
        if replace:
            _rename_over(partial, path)
        else:
            _rename_unless_there(partial, path)
        failpoint("folder.after-rename")
        sync_folder(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename_unless_there(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _rename_over(partial: Path, path: Path) -> None:
    """Put a folder in another's place; only the moment between two renames has neither."""
    if not path.exists():
        partial.rename(path)
        return
    doomed = _doomed_name(path)
    path.rename(doomed)
    try:
        partial.rename(path)
    except OSError:
        doomed.rename(path)
        raise
    shutil.rmtree(doomed, ignore_errors=True)


def _doomed_name(path: Path) -> Path:
    return _partial_name(path.with_name(f"old-{path.name}"))


def remove_folder(path: Path) -> None:
    """Remove a folder so that, killed half-way, it is gone rather than torn."""
    doomed = _doomed_name(path)
    path.rename(doomed)
    failpoint("folder.before-remove")
    shutil.rmtree(doomed, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    """Remove what processes that no longer live left half-written in a folder."""
    for leftover in folder.glob(f"{_PARTIAL}*"):
        owner = leftover.name.removeprefix(_PARTIAL).split("-", 1)[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def user_path(text: str) -> Path:
    """Return the path a user typed, with ~ written out."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"this path cannot be understood: {error}", got=text) from error


def default_cache_dir() -> Path:
    """Return the user's cache folder for Convoy."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "convoy"


def write_manifest(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write plain values with their own digest, so that not one changed bit goes unnoticed."""
    manifest = {"format": kind, "digest": _digest_of_values(content), "content": content}
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read what `write_manifest` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of another kind, or damaged; the message says which.
    """
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") != kind:
        given = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{path} has the format {given!r}, not {kind!r}")
    content = manifest.get("content")
    names = {"format", "digest", "content"}
    if (
        not isinstance(content, dict)
        or set(manifest) != names
        or manifest["digest"] != _digest_of_values(content)
    ):
        raise ValueError(f"{path} is damaged: its digest does not match")
    return content


def _digest_of_values(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_text(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
