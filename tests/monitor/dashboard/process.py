"""A real `convoy watch`, as a user starts it."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import start_convoy
from tests.monitor.dashboard.browser import ask

LINK = re.compile(r"(https?)://([^/]+):(\d+)(/enter\?token=[\w-]+)")


@dataclass(frozen=True)
class Watch:
    """A running page, and a cookie for it."""

    process: subprocess.Popen[str]
    port: int
    link: str
    cookie: dict[str, str]


def read_link(process: subprocess.Popen[str]) -> re.Match[str]:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = LINK.search(line)
    assert found, line + process.stderr.read()
    return found


@contextmanager
def watching_process(*arguments: object) -> Iterator[Watch]:
    """Run `convoy watch` while the block runs, and enter by its link."""
    with start_convoy("watch", *arguments) as process:
        try:
            link = read_link(process)
            port = int(link[3])
            answer = ask(port, link[4])
            cookie = {"Cookie": answer.header("set-cookie").partition(";")[0]}
            yield Watch(process, port, link[0], cookie)
        finally:
            process.kill()


def resident_bytes(process: subprocess.Popen[str]) -> int:
    import psutil

    return int(psutil.Process(process.pid).memory_info().rss)


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    """Wait until no process of this number runs any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
