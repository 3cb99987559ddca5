"""Checkpoints: safetensors with a manifest of digests, complete or not there at all.

checkpoints/step-00001250/
    model.safetensors       weights and batch-norm statistics
    optimizer.safetensors   momentum
    manifest.json           digests, progress, and what the weights belong to
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from convoy.errors import CheckpointError
from convoy.files import digest_of, new_folder, remove_folder, remove_partials

_FORMAT = "convoy-checkpoint"
_VERSION = 1
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
    if target.exists() and not _is_whole(target):
        remove_folder(target)
    with new_folder(target) as folder:
        tensors = {"model": checkpoint.model, "optimizer": checkpoint.momentum}
        for name, group in tensors.items():
            plain = {key: t.detach().cpu().contiguous() for key, t in group.items()}
            _save_tensors(folder / f"{name}.safetensors", plain)
        content = {
            "step": checkpoint.step,
            "score": checkpoint.score,
            "identity": checkpoint.identity,
            "progress": checkpoint.progress,
            "files": {path.name: digest_of(path) for path in sorted(folder.iterdir())},
        }
        _write_manifest(folder / "manifest.json", content)
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
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(f"{path} could not be written: {error}") from error


def _write_manifest(path: Path, content: dict[str, Any]) -> None:
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "digest": _content_digest(content),
        "content": content,
    }
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no readable manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of Convoy")
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} was written by another version of Convoy",
            got=manifest.get("version"),
            allowed=str(_VERSION),
        )
    content = manifest.get("content")
    if not isinstance(content, dict) or manifest.get("digest") != _content_digest(content):
        raise CheckpointError(f"{path} has a damaged manifest: its digest does not match")
    return content


def _content_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True


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
