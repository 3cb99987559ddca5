"""What does it cost to be watched? Training alone, with its events, and with the page open.

LeNet-5 on one node: steps of a few milliseconds, so that anything beside them shows. The page is
served as `--watch` does it, read by one reader as a browser reads it, and held open by another
that never reads. All ways are slices of one job, in turn; the page stands still while it is not
meant to be there.
"""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import psutil
import torch

from convoy.assembly import Given, make_job
from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.config import Config
from convoy.data.images import make_image_set
from convoy.data.load import wrap_data
from convoy.errors import ConvoyError
from convoy.monitor.dashboard.beside import watching
from convoy.monitor.events import EventStream, NodesEvent, StepEvent
from convoy.monitor.journal import Journal
from convoy.outer.job import Job
from convoy.outer.single import train_epoch
from convoy.outer.stop import StopRequest
from convoy.storage.runfolder import RunFolder
from convoy.tracking import untracked

ALONE, WRITTEN, WATCHED = (
    "nobody looks",
    "events are written",
    "page, a reader, one that never reads",
)
_TASK = "lenet5, batch 64"
_SAMPLES, _BATCH = 16_000, 64
_LINK_WITHIN_S = 30.0
_LET_IN = b"HTTP/1.1 200"
_EVENTS = 2_000  # that an interval's cost is the mean of


def bench_monitor(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure all ways in turn, several times."""
    repeats, slices = (3, 2) if quick else (7, 8)
    values = interleave(_contenders, repeats=repeats, slices=slices, tell=tell, alternate=True)
    cost_s = _interval_cost()
    rows = [Row(_TASK, way, "samples/s", found) for way, found in values.items()]
    rows.append(Row("the events of an interval", WRITTEN, "us", (cost_s * 1e6,)))
    watched = median_ratio(values[WATCHED], values[WRITTEN])
    written = median_ratio(values[WRITTEN], values[ALONE])
    bars = (
        Bar("speed: page and readers / events", watched, at_least=0.99),
        Bar("speed: events / nobody looks", written, at_least=0.99),
        Bar("events: part of the time", cost_s / Config().log_interval_s, at_most=0.01),
    )
    return Report("monitor", repeats, tuple(rows), bars)


def _contenders(stack: ExitStack) -> Contenders:
    """Return the same job, with and without events, beside a page that runs or stands still."""
    folder = stack.enter_context(RunFolder(Path(stack.enter_context(TemporaryDirectory()))))
    folder.create()
    silent, written = EventStream([]), EventStream([Journal(folder.events)])
    stack.callback(written.close)
    job = _make_job(folder, silent)
    page = stack.enter_context(_readers(folder.path))

    def run(events: EventStream, *, shown: bool) -> float:
        job.events = events
        # A page that stands still costs nothing, and is there again at once.
        (page.resume if shown else page.suspend)()
        speed = _train(job)
        page.resume()
        return speed

    return {
        ALONE: partial(run, silent, shown=False),
        WRITTEN: partial(run, written, shown=False),
        WATCHED: partial(run, written, shown=True),
    }


def _make_job(folder: RunFolder, events: EventStream) -> Job:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (_SAMPLES, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (_SAMPLES,), generator=generator)
    part = make_image_set(images, labels, [str(i) for i in range(10)], "random images")
    config = Config(batch=_BATCH, lr=0.001, precision="fp32", memory_format="channels_last")
    given = Given(data=wrap_data(part, part))
    return make_job(config, given, folder.checkpoints, events, StopRequest(), untracked)


def _train(job: Job) -> float:
    """Train an epoch; return the samples per second."""
    job.progress.step = job.progress.count = job.progress.correct = 0
    job.progress.loss = 0.0
    started = time.perf_counter()
    train_epoch(job)
    return len(job.train) / (time.perf_counter() - started)


# ---------------------------------------------------------------- those who look


@contextmanager
def _readers(folder: Path) -> Iterator[psutil.Process]:
    """Open the page of a run twice: one reads all, one reads nothing; give the page's process."""
    told: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(watching(folder, 0, told.append))
        link = urlsplit(_wait_for_link(told))
        cookie = _enter(link.netloc, f"{link.path}?{link.query}")
        for reads in (True, False):
            stack.callback(_open_stream(link.netloc, cookie, reads=reads).close)
        yield psutil.Process().children()[-1]


def _wait_for_link(told: list[str]) -> str:
    limit = time.monotonic() + _LINK_WITHIN_S
    while not told:
        if time.monotonic() > limit:
            raise ConvoyError("the page did not start")
        time.sleep(0.02)
    return told[0].split()[-1]


def _enter(netloc: str, path: str) -> str:
    """Exchange the link's token for the cookie."""
    connection = http.client.HTTPConnection(netloc, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    connection.close()
    return str(answer.headers["Set-Cookie"]).partition(";")[0]


def _open_stream(netloc: str, cookie: str, *, reads: bool) -> socket.socket:
    host, _, port = netloc.rpartition(":")
    opened = socket.create_connection((host, int(port)), timeout=None)
    request = f"GET /api/stream HTTP/1.1\r\nHost: {netloc}\r\nCookie: {cookie}\r\n\r\n"
    opened.sendall(request.encode())
    # Proof that it is let in: a reader that is turned away would cost nothing, too.
    answered = opened.recv(len(_LET_IN))
    if answered != _LET_IN:
        raise ConvoyError("the page turned its reader away", got=answered.decode("latin-1"))
    if reads:
        threading.Thread(target=_read_all, args=(opened,), daemon=True).start()
    return opened


def _read_all(opened: socket.socket) -> None:
    try:
        while opened.recv(1 << 16):
            pass
    except OSError:
        return  # it was closed


# ---------------------------------------------------------------- what events cost


def _interval_cost() -> float:
    """Return the seconds that the events of an interval take: one of steps, one of four nodes."""
    step = StepEvent(
        epoch=1,
        step=5,
        steps=10,
        samples=640,
        loss=0.5,
        accuracy=0.8,
        samples_per_s=1e4,
        learning_rate=0.1,
    )
    numbers = [float(number) for number in range(4)]
    nodes = NodesEvent(
        step=5,
        nodes=[0, 1, 2, 3],
        speeds=numbers,
        shares=[16] * 4,
        samples=[160] * 4,
        busy_s=numbers,
        waiting_s=numbers,
        exchange_s=0.01,
    )
    with TemporaryDirectory() as folder:
        events = EventStream([Journal(Path(folder, "events.jsonl"))])
        started = time.perf_counter()
        for _ in range(_EVENTS):
            events.emit(step)
            events.emit(nodes)
        took_s = time.perf_counter() - started
        events.close()
    return took_s / _EVENTS
