"""Ctrl-C once: finish the step, save, leave. Twice: leave at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

from convoy.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(Protocol):
    """Says whether training should come to an end after the current step."""

    @property
    def requested(self) -> bool:
        """Tell whether someone asked to stop."""
        ...


class NeverStop:
    """Nobody asks to stop."""

    requested = False


class StopRequest:
    """Remembers that someone asked to stop, while it is entered as a context."""

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread only, and only there may they be handled.
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(Interrupted.exit_code)
        self.requested = True
