"""What must be on disk before a node is told something, and when it is written. No clock, no disk.

A change is anything that happened to the service. With a journal every answer waits until the
changes that it tells of are written; without one, no answer may be further from the newest state
on disk than what may be lost.
"""

from dataclasses import dataclass


@dataclass
class Durability:
    """Keeps count of what happened and of what is on disk.

    Attributes:
        journal: whoever is answered never loses what it was answered for.
        versions: that may be lost at most, otherwise.
        version: the newest one on disk.
        changes: how many there were.
        written: how many of them are on disk.
        problem: why the last state could not be written; empty if it could.
    """

    journal: bool
    versions: int
    version: int
    changes: int = 0
    written: int = 0
    problem: str = ""

    def may_tell(self, version: int, change: int, *, is_over: bool) -> bool:
        """Tell whether no more than is allowed would be lost with the service after an answer."""
        if self.problem:  # a full disk does not stop the training
            return True
        if self.journal or is_over:  # who hears that it is over does not come back
            return self.written >= change
        return version - self.version <= self.versions

    def is_due(self, version: int, *, is_over: bool, is_idle: bool) -> bool:
        """Tell whether to write now.

        Args:
            version: the newest one.
            is_over: everything is trained.
            is_idle: nothing has been written for long.
        """
        if self.written == self.changes:
            return False
        # Half of what may be lost: nobody has to wait for the disk, unless it is slow.
        is_much = version - self.version >= max(1, self.versions // 2)
        return self.journal or is_over or is_much or is_idle

    def note_written(self, changes: int, version: int, problem: str) -> None:
        """Note that a state was written, or why it could not be."""
        self.written, self.problem = changes, problem
        self.version = self.version if problem else version
