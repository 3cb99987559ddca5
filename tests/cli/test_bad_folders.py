"""Bad output folders and bad resumes: refused, and what lay there is untouched."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import CheckpointError
from convoy.storage.checkpoint import load_checkpoint
from convoy.trainer import run_training
from tests.cli.conftest import Convoy, Refused
from tests.cli.test_train import TINY, write_stripes


def _out_not_empty(path: Path) -> str:
    (path / "mine").mkdir()
    (path / "mine" / "thesis.txt").write_text("x")
    return "mine"


def _out_is_a_file(path: Path) -> str:
    (path / "mine").write_text("x")
    return "mine"


def _out_below_a_file(path: Path) -> str:
    return f"{_out_is_a_file(path)}/run"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_out_not_empty, ("is not empty", "'mine'", "--resume")),
        (_out_is_a_file, ("cannot be written", "'mine'", "--out")),
        (_out_below_a_file, ("cannot be written", "'mine/run'", "--out")),
        (lambda _: "x" * 300, ("cannot be written", "--out")),
    ],
)
def test_bad_out(
    refused: Refused, tmp_path: Path, prepare: Callable[[Path], str], words: tuple[str, ...]
) -> None:
    refused("train", "--out", prepare(tmp_path), words=words)


def _options(data: Path, out: Path, **changes: object) -> dict[str, Any]:
    names = [str(flag).removeprefix("--").replace("-", "_") for flag in TINY[::2]]
    tiny = dict(zip(names, TINY[1::2], strict=True))
    return {**tiny, "data": str(data), "out": str(out), **changes}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run stopped half-way, one of another model, and their data."""
    root = tmp_path_factory.mktemp("trained")
    data = write_stripes(root / "data.npz")
    write_stripes(root / "other.npz", seed=1)
    run_training(_options(data, root / "run", epochs=4, stop_after=2))
    run_training(_options(data, root / "resnet", model="resnet20"))
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that was stopped half-way."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def _tear(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def _no_checkpoint(run: Path, trained: Path) -> None:
    del trained
    shutil.rmtree(run / "checkpoints")


def _torn_only(run: Path, trained: Path) -> None:
    del trained
    for checkpoint in (run / "checkpoints").iterdir():
        _tear(checkpoint)


def _other_model(run: Path, trained: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained / "resnet" / "checkpoints", run / "checkpoints")


def _other_data(run: Path, trained: Path) -> None:
    text = (run / "config.toml").read_text()
    config = text.replace(str(trained / "data.npz"), str(trained / "other.npz"))
    assert config != text
    (run / "config.toml").write_text(config)


def _data_gone(run: Path, trained: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(str(trained / "data.npz"), "/gone.npz"))


def _other_version(run: Path, trained: Path) -> None:
    del trained
    for checkpoint in (run / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(
            json.dumps({**manifest, "format": "convoy-checkpoint-9"})
        )


def _config_broken(run: Path, trained: Path) -> None:
    del trained
    (run / "config.toml").write_text("epochs = = 1")


def _config_foreign(run: Path, trained: Path) -> None:
    del trained
    (run / "config.toml").write_text("[tool.black]\nline-length = 100")


def _checkpoints_a_file(run: Path, trained: Path) -> None:
    _no_checkpoint(run, trained)
    (run / "checkpoints").write_text("x")


def _as_it_is(run: Path, trained: Path) -> None:
    del run, trained


RESUME: list[Any] = [
    ("no checkpoint", _no_checkpoint, (), ("there is no checkpoint", "checkpoints")),
    ("checkpoints a file", _checkpoints_a_file, (), ("there is no checkpoint", "checkpoints")),
    ("torn only", _torn_only, (), ("no whole checkpoint", "model.safetensors", "damaged")),
    ("another model's", _other_model, (), ("another run", "'model'", "'resnet20'", "'lenet5'")),
    ("other data", _other_data, (), ("another run", "'data' differs")),
    ("data gone", _data_gone, (), ("unknown data set", "/gone.npz")),
    ("another version's", _other_version, (), ("convoy-checkpoint-9", "convoy-checkpoint-1")),
    ("config broken", _config_broken, (), ("config.toml", "not valid TOML")),
    ("config foreign", _config_foreign, (), ("config.toml", "unknown option 'tool'")),
    ("lr changed", _as_it_is, ("--lr", 0.5), ("cannot change 'lr'", "0.5", "Start a new run")),
    ("model changed", _as_it_is, ("--model", "vgg16"), ("cannot change 'model'", "'vgg16'")),
    ("seed changed", _as_it_is, ("--seed", 9), ("cannot change 'seed'", "9", "epochs")),
    ("with out", _as_it_is, ("--out", "else"), ("stays in its folder", "'else'")),
    ("finished", _as_it_is, ("--epochs", 2), ("finished", "2 epochs", "larger --epochs")),
    ("epochs too few", _as_it_is, ("--epochs", 1), ("finished", "2 epochs")),
    ("device unknown", _as_it_is, ("--device", "gpu"), ("unknown device", "'gpu'")),
]


@pytest.mark.parametrize(
    ("damage", "options", "words"), [case[1:] for case in RESUME], ids=[case[0] for case in RESUME]
)
def test_bad_resume(
    refused: Refused,
    run: Path,
    trained: Path,
    damage: Callable[[Path, Path], None],
    options: tuple[object, ...],
    words: tuple[str, ...],
) -> None:
    damage(run, trained)
    refused("train", "--resume", "run", *options, words=words)


@pytest.mark.usefixtures("run")
def test_resume_with_a_run_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 0.1")
    refused("train", "run.toml", "--resume", "run", words=("has its own config", "'run.toml'"))


def test_resume_of_an_empty_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused("train", "--resume", "empty", words=("holds no run of Convoy", "'empty'"))


def test_resume_of_a_run_that_another_process_works_on(refused: Refused, run: Path) -> None:
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused("train", "--resume", "run", words=("another process", "'run'"), code=3)


def test_resume_of_a_run_whose_pickle_is_not_executed(refused: Refused, run: Path) -> None:
    canary = run.parent / "canary"
    for checkpoint in (run / "checkpoints").iterdir():
        payload = f"cos\nsystem\n(S'touch {canary}'\ntR."
        (checkpoint / "model.safetensors").write_text(payload)
    refused("train", "--resume", "run", words=("no whole checkpoint",))
    assert not canary.exists()


@pytest.mark.usefixtures("run")
def test_out_that_holds_a_run(refused: Refused) -> None:
    refused("train", "--out", "run", words=("is not empty", "'run'", "--resume"))


def test_torn_newest_checkpoint_falls_back_to_the_previous_with_a_warning(
    convoy: Convoy, run: Path
) -> None:
    before = sorted((run / "checkpoints").iterdir())
    _tear(before[-1])
    outcome = convoy("train", "--resume", "run", "--stop-after", 0, "--json")
    assert outcome.code == 0
    assert f"warning: passed over a damaged checkpoint: {before[-1].relative_to(run.parent)}" in (
        outcome.err.replace("\n", "")
    )
    assert json.loads(outcome.out)["epochs"] == 4
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert load_checkpoint(newest).progress["epoch"] == 4
    assert "convoy: error" not in outcome.err
    with pytest.raises(CheckpointError):
        load_checkpoint(before[-1])
