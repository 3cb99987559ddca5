"""What the tests of bad input share: a refusal must be one clear line and leave no trace."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

Convoy = Callable[..., Outcome]
Snapshot = dict[str, bytes | None]
Refused = Callable[..., None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user modules that a test makes to that test, and warnings on one line."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("COLUMNS", "1000")


def snapshot(root: Path) -> Snapshot:
    """Return every path below a folder, with the content of the files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def refused(convoy: Convoy, tmp_path: Path) -> Refused:
    """Return a function that runs a command line, which must be refused in the proper way."""

    def call(*arguments: object, words: tuple[str, ...], code: int = 2) -> None:
        before = snapshot(tmp_path)
        outcome = convoy(*arguments)
        lines = [line for line in outcome.err.splitlines() if not line.startswith("warning:")]
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("convoy: error: ")
        for word in words:
            assert word in lines[0]
        assert outcome.code == code
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        assert snapshot(tmp_path) == before

    return call
