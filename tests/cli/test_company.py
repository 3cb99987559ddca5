"""`--watch` and `--tensorboard`: what goes on beside a run is started with it and ends with it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.monitor.dashboard import beside
from tests.cli.test_train import TINY, write_stripes
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]
QUICK = (*TINY, "--data", "stripes.npz", "--out", "run")


@pytest.fixture(autouse=True)
def _stripes() -> None:
    write_stripes(Path("stripes.npz"))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens to pages; none is really served (tests/monitor/dashboard does that)."""
    story: list[str] = []

    @contextmanager
    def watching(folder: Path, port: int | None, tell: Callable[[str], None]) -> Iterator[None]:
        assert port is None
        story.append(f"shown {folder}")
        tell("the link [of] the page")
        yield
        story.append((folder / "events.jsonl").read_text().splitlines()[-1])

    monkeypatch.setattr(beside, "watching", watching)
    return story


def test_the_page_is_there_from_before_the_start_until_after_the_end(
    convoy: Convoy, pages: list[str]
) -> None:
    outcome = convoy("train", *QUICK, "--watch")
    assert outcome.code == 0
    shown, last = pages
    assert shown == "shown run"
    assert '"event": "end"' in last
    lines = outcome.err.splitlines()
    assert lines[0] == "the link [of] the page"
    assert not Path("run/tensorboard").exists()


def test_a_resumed_run_can_be_watched_too(convoy: Convoy, pages: list[str]) -> None:
    assert convoy("train", *QUICK).code == 0
    assert pages == []
    assert convoy("train", "--resume", "run", "--epochs", 2, "--watch").code == 0
    assert pages[0] == "shown run"


def test_tensorboard_finds_the_curves_in_the_run_s_folder(convoy: Convoy) -> None:
    assert convoy("train", *QUICK, "--tensorboard").code == 0
    (file,) = Path("run/tensorboard").iterdir()
    assert b"test/accuracy" in file.read_bytes()


def test_where_tensorboard_is_missing_nothing_is_begun(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    outcome = convoy("train", *QUICK, "--tensorboard")
    assert outcome.code == 2
    assert "convoy-train[tensorboard]" in outcome.err
    assert not Path("run").exists()
