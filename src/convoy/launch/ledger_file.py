"""The run's ledger on disk: which node trained which samples in which update."""

import json
from pathlib import Path
from typing import IO, Any


class LedgerFile:
    """The file of committed updates, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._known: dict[int, Any] = {}
        self._kept: list[list[Any]] = []

    def __enter__(self) -> "LedgerFile":
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, updates: list[list[Any]]) -> None:
        """Append updates, leaving out those that a new scribe tells once more."""
        assert self._file is not None
        for update in updates:
            if self._known.get(update[0]) != update:
                for later in [step for step in self._known if step > update[0]]:
                    del self._known[later]  # this one makes them void
                self._known[update[0]] = update
                self._file.write(json.dumps(update) + "\n")
        for step in sorted(self._known)[:-4096]:
            del self._known[step]
        self._file.flush()

    def keep(self, step: int) -> None:
        """Remember what is in the weights of a checkpoint: all updates before this step."""
        self._kept = [self._known[k] for k in sorted(self._known) if k < step]

    def go_back(self) -> None:
        """Write down what the checkpoint contains, if something else was written since."""
        self.write(self._kept)
