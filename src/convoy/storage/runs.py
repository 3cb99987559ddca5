"""The runs below a folder: found, read and described, whatever state they are in."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.config import read_toml
from convoy.errors import ConfigError, ConvoyError
from convoy.storage.checkpoint import list_checkpoints
from convoy.storage.runfolder import RunFolder


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says about it.

    Attributes:
        path: the folder.
        config: the effective configuration, as plain values.
        summary: how it ended; empty while it has not.
        checkpoints: the names of its checkpoints, oldest first.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    checkpoints: list[str]

    @property
    def state(self) -> str:
        """Return "finished", "interrupted" ... or "unfinished" for a run with no summary."""
        return str(self.summary.get("state", "unfinished"))


def read_run(path: Path) -> RunRecord:
    """Read one run's folder."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError("this folder holds no run of Convoy", got=str(path))
    return RunRecord(
        path=path,
        config=read_toml(folder.config),
        summary=_read_summary(folder.summary),
        checkpoints=[p.name for p in list_checkpoints(folder.checkpoints)],
    )


def list_runs(root: Path) -> list[RunRecord]:
    """Read every run directly below a folder, oldest first; what is no run is passed over."""
    if not root.is_dir():
        raise ConfigError("there is no such folder of runs", got=str(root))
    records = []
    for path in sorted(root.iterdir()):
        try:
            records.append(read_run(path))
        except ConvoyError:
            continue
    return records


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
