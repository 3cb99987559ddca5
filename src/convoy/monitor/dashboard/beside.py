"""The page of a run that is being trained, in a process of its own beside the training.

What the page costs is then never taken from training's interpreter, and what kills the page does
not kill the training.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_TIME_TO_END_S = 5.0


@contextlib.contextmanager
def watching(folder: Path, port: int | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Show a run's page while the block runs.

    Args:
        folder: the run's folder, which must be there.
        port: where; None takes the usual one, or the next that is free.
        tell: is told the page's link, and what goes wrong, a line each; from another thread.
    """
    try:
        page = _Page(folder, port, tell)
    except OSError as error:
        tell(f"the page could not be started ({error}); training goes on")
        yield
        return
    try:
        yield
    finally:
        page.end()


class _Page:
    """A `convoy watch` of ours."""

    def __init__(self, folder: Path, port: int | None, tell: Callable[[str], None]) -> None:
        command = [sys.executable, "-m", "convoy", "watch", str(folder.absolute()), "--beside"]
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command if port is None else [*command, "--port", str(port)],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the training, which may take time to save
        )
        self._tell = tell
        self._is_ending = False
        self._listener = threading.Thread(target=self._listen, name="page", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Pass on what the page says; and if it ends by itself, tell that too."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip() and not self._is_ending:
                self._tell(line.rstrip())
        code = self._process.wait()
        if not self._is_ending:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._tell(f"the page {how}; training goes on")

    def end(self) -> None:
        """End the page; one that does not listen is killed."""
        self._is_ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_TIME_TO_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(_TIME_TO_END_S)
        if self._process.stderr is not None and not self._listener.is_alive():
            self._process.stderr.close()
