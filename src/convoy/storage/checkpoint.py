"""Checkpoints: safetensors with a manifest of digests, complete or not there at all.

checkpoints/step-00001250/
    model.safetensors       weights and batch-norm statistics
    optimizer.safetensors   momentum
    manifest.json           digests, progress, and what the weights belong to
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from convoy.errors import CheckpointError
from convoy.files import (
    digest_of,
    new_folder,
    read_manifest,
    remove_folder,
    remove_partials,
    write_manifest,
)

_FORMAT = "convoy-checkpoint-1"
_KEEP_LAST = 2


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A moment of training, as plain tensors and plain values.

    Attributes:
        step: how many updates the weights have had.
        model, momentum: tensors by name.
        progress: where training stands.
        identity: what the weights belong to (model, data, seed).
        score: test accuracy at this moment, if it was measured.
    """

    step: int
    model: dict[str, Tensor]
    momentum: dict[str, Tensor]
    progress: dict[str, Any]
    identity: dict[str, Any]
    score: float | None = None


@dataclass(frozen=True)
class Found:
    """A loaded checkpoint, where it lay, and the newer ones that were damaged."""

    checkpoint: Checkpoint
    path: Path
    damaged: list[str] = field(default_factory=list)


def save_checkpoint(root: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and prune older ones; it appears only when it is complete on disk."""
    target = root / f"step-{checkpoint.step:08d}"
    root.mkdir(parents=True, exist_ok=True)
    remove_partials(root)
    with new_folder(target, replace=True) as folder:
        tensors = {"model": checkpoint.model, "optimizer": checkpoint.momentum}
        for name, group in tensors.items():
            _save_tensors(folder / f"{name}.safetensors", group)
        content = {
            "step": checkpoint.step,
            "score": checkpoint.score,
            "identity": checkpoint.identity,
            "progress": checkpoint.progress,
            "files": {path.name: digest_of(path) for path in sorted(folder.iterdir())},
        }
        write_manifest(folder / "manifest.json", _FORMAT, content)
    _prune(root)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint, every byte of it checked.

    Raises:
        CheckpointError: it is torn, damaged, or of a version this program does not know.
    """
    manifest = _read_manifest(path)
    try:
        for name, digest in manifest["files"].items():
            if digest_of(path / name) != digest:
                raise CheckpointError(f"{path / name} is damaged: its digest does not match")
        return Checkpoint(
            step=manifest["step"],
            model=safetensors.torch.load_file(path / "model.safetensors"),
            momentum=safetensors.torch.load_file(path / "optimizer.safetensors"),
            progress=manifest["progress"],
            identity=manifest["identity"],
            score=manifest["score"],
        )
    except (OSError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def load_newest(root: Path) -> Found:
    """Read the newest checkpoint that is whole; torn ones are passed over and named."""
    damaged: list[str] = []
    for path in reversed(list_checkpoints(root)):
        try:
            return Found(load_checkpoint(path), path, damaged)
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no whole checkpoint is left in {root}: {'; '.join(damaged)}")
    raise CheckpointError(f"there is no checkpoint in {root}")


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints' folders, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir())


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    # A clone, because safetensors refuses names that share memory, as tied weights do.
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    try:
        safetensors.torch.save_file(plain, path)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(f"{path} could not be written: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return read_manifest(path / "manifest.json", _FORMAT)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no whole manifest: {error}") from error


def _prune(root: Path) -> None:
    """Keep the last two and the best."""
    paths = list_checkpoints(root)
    scores = {path: _score(path) for path in paths}
    best = max(paths, key=lambda path: (scores[path], path.name))
    for path in paths[:-_KEEP_LAST]:
        if path != best:
            remove_folder(path)


def _score(path: Path) -> float:
    try:
        score = _read_manifest(path)["score"]
    except CheckpointError:
        return -1.0
    return -1.0 if score is None else float(score)
