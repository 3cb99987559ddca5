"""Checkpoints: bit for bit, pruned, and never trusted when a single bit is off."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.errors import CheckpointError
from convoy.storage.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)


def make_checkpoint(step: int, score: float | None = None, **model: Tensor) -> Checkpoint:
    """Return a small checkpoint whose tensors follow from its step."""
    generator = torch.Generator().manual_seed(step)
    weights = {"a.weight": torch.randn(3, 4, generator=generator), "a.bias": torch.zeros(3)}
    return Checkpoint(
        step=step,
        model=model or weights,
        momentum={"a.weight": torch.randn(3, 4, generator=generator)},
        progress={"epoch": 1, "loss": 0.5, "history": [{"epoch": 1}]},
        identity={"model": "lenet5", "data": "abc", "seed": 0},
        score=score,
    )


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(root)]


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's content in its plain order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reseal(path: Path) -> None:
    """Give a checkpoint's manifest the digests that its files have now."""
    manifest = json.loads((path / "manifest.json").read_text())
    content = manifest["content"]
    for name in content["files"]:
        content["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    text = json.dumps(content, sort_keys=True)
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.14])
TENSORS = {
    "float32": ODD,
    "bfloat16": ODD.to(torch.bfloat16),
    "float16": ODD.to(torch.float16),
    "float64": ODD.double() / 3,
    "int64": torch.tensor([0, -1, 2**62]),
    "uint8": torch.arange(256).to(torch.uint8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(12.0)[::3],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "needs_grad": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    loaded = load_checkpoint(save_checkpoint(tmp_path, make_checkpoint(1, x=tensor))).model["x"]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert bits(loaded) == bits(tensor.detach())


def test_everything_besides_tensors_comes_back(tmp_path: Path) -> None:
    saved = make_checkpoint(12, score=0.75)
    path = save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(path)
    assert path.name == "step-00000012"
    assert (loaded.step, loaded.score) == (12, 0.75)
    assert loaded.progress == saved.progress
    assert loaded.identity == saved.identity
    assert bits(loaded.momentum["a.weight"]) == bits(saved.momentum["a.weight"])


def test_two_names_of_one_tensor_are_both_saved(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    path = save_checkpoint(tmp_path, make_checkpoint(1, first=tied, second=tied))
    loaded = load_checkpoint(path).model
    assert bits(loaded["first"]) == bits(loaded["second"]) == bits(tied)


def test_folder_holds_exactly_the_three_files(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "root", make_checkpoint(1))
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    assert list(path.parent.iterdir()) == [path]


def test_last_two_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert steps(tmp_path) == [4, 5]


def test_best_is_kept_beside_the_last_two(tmp_path: Path) -> None:
    for step, score in enumerate([0.1, 0.9, 0.2, 0.3, 0.4], start=1):
        save_checkpoint(tmp_path, make_checkpoint(step, score))
    assert steps(tmp_path) == [2, 4, 5]


def test_best_gives_way_to_a_better_one_and_to_a_later_one_as_good(tmp_path: Path) -> None:
    for step, score in enumerate([0.9, 0.1, 0.9, 0.1, 0.1], start=1):
        save_checkpoint(tmp_path, make_checkpoint(step, score))
    assert steps(tmp_path) == [3, 4, 5]


def test_one_without_a_score_is_never_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.0, None, None, None], start=1):
        save_checkpoint(tmp_path, make_checkpoint(step, score))
    assert steps(tmp_path) == [1, 3, 4]


def test_damaged_one_at_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(3))
    (path / "model.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, make_checkpoint(3))
    assert load_checkpoint(path).step == 3


def test_leftovers_of_dead_processes_are_removed_on_save(tmp_path: Path) -> None:
    (tmp_path / ".partial-99999999-step-00000001").mkdir()
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    assert list(tmp_path.iterdir()) == [path]


def test_newest_is_loaded(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make_checkpoint(step))
    found = load_newest(tmp_path)
    assert (found.checkpoint.step, found.path.name) == (2, "step-00000002")
    assert found.damaged == []


def test_damaged_newer_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.1)):
        save_checkpoint(tmp_path, make_checkpoint(step, score))
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "optimizer.safetensors").unlink()
    found = load_newest(tmp_path)
    assert found.checkpoint.step == 1
    assert ["step-00000003" in found.damaged[0], "step-00000002" in found.damaged[1]] == [True] * 2


def test_no_checkpoint_and_no_whole_checkpoint_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load_newest(tmp_path)
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint is left in .*step-00000001"):
        load_newest(tmp_path)


def _two_checkpoints(root: Path) -> Path:
    save_checkpoint(root, make_checkpoint(1))
    return save_checkpoint(root, make_checkpoint(2))


def _assert_detected(root: Path, newest: Path) -> None:
    with pytest.raises(CheckpointError):
        load_checkpoint(newest)
    found = load_newest(root)
    assert found.checkpoint.step == 1
    assert len(found.damaged) == 1


def test_200_random_truncations_are_all_detected(tmp_path: Path) -> None:
    newest = _two_checkpoints(tmp_path)
    rng = random.Random(1)
    for _ in range(200):
        file = rng.choice(sorted(newest.iterdir()))
        whole = file.read_bytes()
        file.write_bytes(whole[: rng.randrange(len(whole))])
        _assert_detected(tmp_path, newest)
        file.write_bytes(whole)
    assert load_newest(tmp_path).checkpoint.step == 2


def test_200_random_flipped_bits_are_all_detected(tmp_path: Path) -> None:
    newest = _two_checkpoints(tmp_path)
    rng = random.Random(2)
    for _ in range(200):
        file = rng.choice(sorted(newest.iterdir()))
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        _assert_detected(tmp_path, newest)
        file.write_bytes(whole)
    assert load_newest(tmp_path).checkpoint.step == 2


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_missing_file_is_detected(tmp_path: Path, name: str) -> None:
    newest = _two_checkpoints(tmp_path)
    (newest / name).unlink()
    _assert_detected(tmp_path, newest)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_folder_in_place_of_a_file_is_detected(tmp_path: Path, name: str) -> None:
    newest = _two_checkpoints(tmp_path)
    (newest / name).unlink()
    (newest / name).mkdir()
    _assert_detected(tmp_path, newest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "convoy-checkpoint-2"}, "the format 'convoy-checkpoint-2', not"),
        ({"format": None}, "the format None, not"),
        ({"more": 2}, "digest does not match"),
        ({"digest": "0" * 64}, "digest does not match"),
        ({"content": []}, "digest does not match"),
        ({"content": {}}, "digest does not match"),
    ],
)
def test_manifest_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"x"', "{", "\udcff"])
def test_manifest_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="step-00000001"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("sealed", [False, True])
def test_pickle_is_refused_and_not_executed(tmp_path: Path, name: str, *, sealed: bool) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    canary = tmp_path / "canary"
    # Protocol 0 for os.system("touch canary"): whoever unpickles this runs it.
    (path / name).write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    if sealed:
        reseal(path)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(path)
    assert not canary.exists()


def test_resealed_checkpoint_without_its_model_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1))
    shutil.copy(path / "manifest.json", path / "model.safetensors")
    reseal(path)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(path)
