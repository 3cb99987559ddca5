"""The ledger: which samples were trained in which committed update, and by whom.

An update is a step of the run. A line says which stretch of the epoch's order it was trained
on and how the stretch was divided. When a step is done again (the node that had committed it
was lost, or the run went back to a checkpoint), the newer line counts and everything that
came after the older one is void.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Update:
    """One committed update.

    Attributes:
        step: its number in the run, from 0.
        epoch: the epoch it belongs to, from 0.
        start, stop: the stretch of the epoch's order that was trained.
        quorum: the formation that trained it.
        shares: (node, samples) in the order of the stretch.
    """

    step: int
    epoch: int
    start: int
    stop: int
    quorum: int
    shares: tuple[tuple[int, int], ...]

    def as_line(self) -> list[Any]:
        """Return plain values for a file."""
        return [self.step, self.epoch, self.start, self.stop, self.quorum, self.shares]

    @classmethod
    def from_line(cls, line: Sequence[Any]) -> "Update":
        """Read what `as_line` wrote."""
        step, epoch, start, stop, quorum, shares = line
        given = tuple((int(node), int(count)) for node, count in shares)
        return cls(step, epoch, start, stop, quorum, given)


def settle(lines: Iterable[Update]) -> list[Update]:
    """Return the updates that the weights really contain, in order."""
    valid: list[Update] = []
    for line in lines:
        while valid and valid[-1].step >= line.step:
            valid.pop()  # it was done again: the older one is in no weights that are left
        valid.append(line)
    return valid


def find_faults(lines: Iterable[Update], samples: int, epochs: int | None = None) -> list[str]:
    """Say in words what is wrong with a ledger: a sample missed, or trained twice.

    Args:
        lines: the ledger as it was written.
        samples: training samples in an epoch.
        epochs: how many epochs must be complete; None where the last may be under way.
    """
    faults = []
    valid = settle(lines)
    for number, update in enumerate(valid):
        if update.step != number:
            faults.append(f"update {number} is missing: {update.step} follows")
            break
    by_epoch: dict[int, list[Update]] = {}
    for update in valid:
        by_epoch.setdefault(update.epoch, []).append(update)
        given = sum(count for _, count in update.shares)
        if given != update.stop - update.start:
            faults.append(f"update {update.step} handed out {given} samples of its stretch")
    if list(by_epoch) != list(range(len(by_epoch))):
        faults.append(f"the epochs are {list(by_epoch)}, not one after the other")
    for epoch, updates in by_epoch.items():
        is_last = epoch == len(by_epoch) - 1
        faults += _faults_of_epoch(epoch, updates, samples, may_be_open=epochs is None and is_last)
    if epochs is not None and len(by_epoch) != epochs:
        faults.append(f"{len(by_epoch)} epochs instead of {epochs}")
    return faults


def _faults_of_epoch(
    epoch: int, updates: list[Update], samples: int, *, may_be_open: bool
) -> list[str]:
    faults, reached = [], 0
    for update in updates:
        if update.start != reached:
            faults.append(
                f"epoch {epoch}: update {update.step} starts at sample {update.start}, "
                f"not at {reached}"
            )
        reached = update.stop
    if reached > samples or (reached < samples and not may_be_open):
        faults.append(f"epoch {epoch} ends at sample {reached} of {samples}")
    return faults
