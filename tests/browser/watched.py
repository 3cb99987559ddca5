"""A `convoy watch` for tests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import start_convoy


@dataclass
class Watch:
    """A server, and the link that it has printed."""

    process: subprocess.Popen[str]
    link: str

    @property
    def base(self) -> str:
        """Return the page's address."""
        return self.link.partition("/enter")[0]

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self.base.rpartition(":")[2])


@contextmanager
def watch(run: Path, port: int = 0) -> Iterator[Watch]:
    """Serve a run's page; port 0 is any that is free."""
    process = start_convoy("watch", run, "--port", port)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "/enter?token=" in line, line + process.stderr.read()
        yield Watch(process, line.split()[-1])
    finally:
        process.kill()
        process.communicate()
