"""What all tests share: a cache of their own, small data, and ways to run the program."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from convoy.data.images import ImageSet, make_image_set
from convoy.monitor.events import Event

# The machines that test are shared: how long an example takes says nothing about the code.
settings.register_profile("convoy", deadline=None)
settings.load_profile("convoy")

# Their tests start several processes and are bound to the clock: see CONTRIBUTING.md.
_RUN_AGAIN = [Path(__file__).parent / name for name in ("browser", "faults", "launch")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of several processes run a second time when they fail.

    Not those that hang: pytest-timeout's clock, which has run out, would not stop them again.
    """
    again = pytest.mark.flaky(reruns=1, rerun_except="from pytest-timeout")
    for item in items:
        if any(folder in item.path.parents for folder in _RUN_AGAIN):
            item.add_marker(again)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep decoded images of the tests out of the user's cache."""
    former = os.environ.get("XDG_CACHE_HOME")
    # What is compiled once is good for all: half a minute would be too much for every session.
    compiled = Path(former or Path.home() / ".cache", "torch_extensions")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(compiled))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if former is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = former


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, with one thread: its work is too small for more."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Outcome:
    """What a command line gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def convoy(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs a command line inside this process."""
    from convoy.cli.app import run

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


def start_convoy(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "convoy", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def make_stripes(count: int, *, side: int = 12, seed: int = 0) -> ImageSet:
    """Return noisy images of two classes that differ in which half is brighter."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = torch.randint(0, 128, (count, side, side), dtype=torch.uint8, generator=generator)
    half = side // 2
    images[labels == 0, :, :half] += 64
    images[labels == 1, :, half:] += 64
    return make_image_set(images, labels, ["left", "right"], "stripes")


class Recorder:
    """A sink that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def receive(self, event: Event, when: float) -> None:
        del when
        self.events.append(event)

    def close(self) -> None:
        """Keep what was received."""
