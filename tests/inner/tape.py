"""A recorder that does on the CPU what a CUDA graph does: the same operations, the same addresses.

Every ATen operation is noted while it runs, and all tensors it has changed are put back at the
end, for a capture does nothing. A replay calls the operations, and no Python of the recorded work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Tape:
    """What was recorded."""

    calls: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    replays: int = 0

    def replay(self) -> None:
        """Do it again, each result where it was the first time."""
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, results in self.calls:
                given = {_storage(t) for t in _tensors((args, kwargs))}
                for old, new in zip(
                    _tensors(results), _tensors(operation(*args, **kwargs)), strict=True
                ):
                    if _storage(old) not in given:  # not changed in place, nor a view
                        old.copy_(new)


class TapeRecorder:
    """Records tapes, and keeps them for the test to look at."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, work: Callable[[], None]) -> Tape:
        """Note what some work does."""
        tape = Tape()
        with _unchanged() as watch, _Noting(tape, watch):
            work()
        self.tapes.append(tape)
        return tape


class _Noting(TorchDispatchMode):
    def __init__(self, tape: Tape, watch: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._watch = tape, watch

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        for tensor in _tensors((args, kwargs)):
            self._watch(tensor)
        results = operation(*args, **(kwargs or {}))
        self._tape.calls.append((operation, args, kwargs or {}, results))
        return results


@contextmanager
def _unchanged() -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that remembers a tensor's memory; put all of it back at the end."""
    saved: dict[int, tuple[Any, Any]] = {}
    generator = torch.get_rng_state()

    def watch(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in saved:
            saved[storage.data_ptr()] = (storage, storage.clone())

    try:
        yield watch
    finally:
        for storage, former in saved.values():
            storage.copy_(former)
        torch.set_rng_state(generator)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
