"""kill -9 at every place where a file is half-way: nothing that was saved is lost or torn."""

import signal
from pathlib import Path

import pytest
import torch

from convoy.files import FAILPOINTS
from convoy.storage.checkpoint import list_checkpoints, load_checkpoint, load_newest
from convoy.trainer import run_training
from tests.faults.team import start_program

OPTIONS = {
    "model": "tests.faults.paced:build",
    "epochs": 4,
    "batch": 500,
    "precision": "fp32",
    "memory_format": "contiguous",
    "device": "cpu",
    "threads": 1,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Train once without a fault; this also fills the image cache for the others."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_training({**OPTIONS, "out": str(out)})
    return load_newest(out / "checkpoints").checkpoint.model


# The third checkpoint is the first whose writing also removes an older one.
PLACES = [
    (name, 1 if name == "folder.before-remove" else 3)
    for name in FAILPOINTS
    if name.startswith("folder.")
]


@pytest.mark.parametrize(("place", "number"), PLACES)
def test_a_kill_while_a_checkpoint_is_written_costs_at_most_that_checkpoint(
    place: str, number: int, undisturbed: dict[str, torch.Tensor]
) -> None:
    process = start_program(
        "train", *FLAGS, "--out=run", "--quiet", CONVOY_FAILPOINT=f"{place}@{number}"
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors  # the fault really happened
    checkpoints = Path("run/checkpoints")
    saved = [load_checkpoint(path) for path in list_checkpoints(checkpoints)]  # none is torn
    assert saved[-1].progress["epoch"] >= 2

    run = run_training({}, resume=Path("run"))

    assert run.state == "finished"
    final = load_newest(checkpoints).checkpoint.model
    assert all(torch.equal(final[name], undisturbed[name]) for name in undisturbed)
    assert not list(Path("run").rglob(".partial-*"))


def test_a_kill_before_the_config_is_whole_leaves_no_half_config() -> None:
    process = start_program("train", *FLAGS, "--out=run", CONVOY_FAILPOINT="file.before-rename@1")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not Path("run/config.toml").exists()


def test_a_kill_while_images_are_cached_leaves_no_half_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = ("train", *FLAGS, "--quiet", f"--cache-dir={cache}")
    process = start_program(*arguments, "--out=one", CONVOY_FAILPOINT="folder.before-rename@1")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert [path.name.startswith(".partial-") for path in cache.iterdir()] == [True]
    again = start_program(*arguments, "--out=two")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert [path.name.startswith(".partial-") for path in cache.iterdir()] == [False]
