"""A run's folder: its config, its events, its summary and its checkpoints.

runs/20261116-101500-lenet5-fashion-mini/
    config.toml      the effective configuration: `convoy train config.toml` runs it again
    events.jsonl     what happened, line by line
    ledger.jsonl     which samples were trained in which update, where there are several nodes
    summary.json     how it ended
    checkpoints/     see convoy.storage.checkpoint
"""

import contextlib
import fcntl
import itertools
import json
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import tomlkit

from convoy.config import FIELDS, Config, read_toml
from convoy.errors import CheckpointError, ConfigError, EnvironmentProblem, StorageError
from convoy.files import remove_partials, user_path, write_atomically

DEFAULT_ROOT = Path("runs")


class NotEmptyError(ConfigError):
    """A new run was to be put where something lies already (exit code 2)."""


class RunFolder:
    """The folder of one run, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._made: list[Path] = []  # folders that were not there before, innermost first

    @property
    def checkpoints(self) -> Path:
        """Return where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """Return the file of events."""
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """Return the file of committed updates, where several nodes make them."""
        return self.path / "ledger.jsonl"

    @property
    def record(self) -> Path:
        """Return the file of what happened to the parameter service, where there is one."""
        return self.path / "record.jsonl"

    @property
    def summary(self) -> Path:
        """Return the file that says how the run ended."""
        return self.path / "summary.json"

    @property
    def config(self) -> Path:
        """Return the effective configuration's file."""
        return self.path / "config.toml"

    def create(self) -> None:
        """Make the folder; refuse one that holds something already."""
        try:
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise NotEmptyError(
                    "the output folder is not empty",
                    got=str(self.path),
                    hint="Give another --out, or --resume to go on with the run in it.",
                )
            self.acquire()
        except OSError as error:
            raise ConfigError(
                f"the output folder cannot be written: {error}",
                got=str(self.path),
                hint="Give another --out.",
            ) from error

    def open(self) -> Config:
        """Take hold of an existing run and return its configuration."""
        if not self.config.is_file():
            raise CheckpointError("this folder holds no run of Convoy", got=str(self.path))
        self.acquire()
        remove_partials(self.path)
        return Config(**read_toml(self.config))

    def acquire(self) -> None:
        """Hold the run; the hold ends with the process, however that ends."""
        try:
            # The handle must outlive this call: closing it would release the lock.
            handle = (self.path / ".lock").open("w")
        except OSError as error:
            raise EnvironmentProblem(f"this run's folder cannot be written: {error}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise EnvironmentProblem(
                "another process is working on this run", got=str(self.path)
            ) from None
        self._lock = handle

    def write_config(self, config: Config) -> None:
        """Write the effective configuration, each value with its meaning."""
        try:
            write_atomically(self.config, config_text(config))
        except OSError as error:
            raise StorageError(f"{self.config} could not be written: {error}") from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write how the run ended."""
        try:
            write_atomically(self.summary, json.dumps(summary, indent=1))
        except OSError as error:
            raise StorageError(f"{self.summary} could not be written: {error}") from error

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            if not self.config.exists():  # it never came to a run: leave no trace
                self._remove_unused()

    def _remove_unused(self) -> None:
        (self.path / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # someone else may have put something there
            for folder in self._made:
                folder.rmdir()


def is_held(path: Path) -> bool:
    """Tell whether a process works on the run in a folder; nothing is written to find out.

    Where that cannot be found out, as in another user's folder, one is thought to.
    """
    try:
        with (path / ".lock").open("rb") as handle:
            # A shared hold for the blink of an eye: `acquire` wants the run for itself.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def config_text(config: Config) -> str:
    """Return a configuration as TOML, each value with its meaning in a comment.

    What concerns one start of the run only (`out`, `stop_after`) is left out.
    """
    document = tomlkit.document()
    for name, value in config.as_dict().items():
        if value is not None and FIELDS[name].metadata["kept"]:
            item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
            item.comment(FIELDS[name].metadata["help"])
            document.add(name, item)
    return tomlkit.dumps(document)


def new_run_folder(config: Config) -> RunFolder:
    """Make the folder of a new run: the one that was asked for, or one under runs/."""
    if config.out:
        folder = RunFolder(user_path(config.out))
        folder.create()
        return folder
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{_word(config.model)}-{_word(config.data)}"
    for number in itertools.count(1):
        folder = RunFolder(DEFAULT_ROOT / (stem if number == 1 else f"{stem}-{number}"))
        try:
            folder.create()
            return folder
        except NotEmptyError:
            continue  # another run of the same second
    raise AssertionError("unreachable")


def _word(name: str) -> str:
    last = name.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
    return (
        "".join(c if c.isalnum() or c == "-" else "-" for c in last.lower())[:25].strip("-")
        or "run"
    )
