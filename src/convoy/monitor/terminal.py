"""What a person sees while a run goes on: a live view on a terminal, lines anywhere else."""

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    GroupEvent,
    JoinEvent,
    LeaveEvent,
    NodesEvent,
    NoteEvent,
    PausedEvent,
    RefusedEvent,
    SharesEvent,
    StalenessEvent,
    StartEvent,
    StepEvent,
    TimelineEvent,
    WarningEvent,
    as_record,
)
from convoy.monitor.live import LiveView
from convoy.monitor.view import RunView
from convoy.monitor.wording import sentence
from convoy.tracking import Track

T = TypeVar("T")

_LINE_EVERY_S = 10.0  # between two progress lines where there is no terminal
_HEADER = " epoch   train loss   train acc   test loss   test acc   samples/s       time"


def make_console(*, quiet: bool = False) -> Console:
    """Return the console for people: standard error, so that standard output stays for results."""
    return Console(stderr=True, quiet=quiet, highlight=False)


class TerminalView:
    """Shows a run's events on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: StartEvent | None = None
        self._view = RunView("")
        self._live: LiveView | None = None
        self._last_line = time.monotonic()

    def receive(self, event: Event, when: float) -> None:
        """Show an event."""
        self._view.take(as_record(event, when))
        if self._live is not None:
            self._live.show_nodes(self._view.nodes())
        match event:
            case StartEvent():
                self._show_start(event)
            case StepEvent():
                self._show_step(event)
            case EvaluationEvent():
                self._show_evaluation(event)
            case WarningEvent() | RefusedEvent() | PausedEvent():
                self._console.print(f"[yellow]warning:[/] {escape(event.reason)}")
            case EndEvent():
                self.close()
                self._console.print(f"[bold]{event.state}[/]: {escape(event.reason)}")
            case SharesEvent(of="layers"):
                self._console.print(f"[dim]{escape(sentence(event) or '')}[/]")
            case CheckpointEvent() | NodesEvent() | SharesEvent():
                pass  # many; the live view and the table at the end sum them up
            case StalenessEvent() | TimelineEvent():
                pass
            case _:
                self._show_nodes(event)

    def _show_nodes(self, event: Event) -> None:
        """Show who comes and goes."""
        match event:
            case NoteEvent():
                self._console.print(escape(event.text))
            case JoinEvent():
                self._console.print(
                    f"{escape(event.name)} on {event.device}: {escape(event.reason)}"
                )
            case LeaveEvent():
                colour = "yellow" if event.fault else "default"
                self._console.print(f"[{colour}]{escape(event.reason)}[/]")
            case GroupEvent():
                self._show_group(event)
            case _:
                self._console.print(escape(str(event)))

    def _show_group(self, event: GroupEvent) -> None:
        names = ", ".join(str(number + 1) for number in event.nodes)
        plural = "s" if len(event.nodes) > 1 else ""
        self._console.print(
            f"node{plural} {names} train from step {event.step} "
            f"[dim](after {event.pause_s:.2f} s: {escape(event.reason)})[/]"
        )

    def close(self) -> None:
        """Take away what changes in place."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _show_start(self, event: StartEvent) -> None:
        self._start = event
        self._console.print(
            f"[bold]{escape(event.model)}[/] ({event.parameters:,} weights) on "
            f"[bold]{escape(event.data)}[/]: {event.train_samples:,} images and "
            f"{event.test_samples:,} to test"
        )
        self._console.print(
            f"{event.strategy}, {event.executor} on {event.device} "
            f"({_threads(event.threads)}, {event.precision}, {event.memory_format}); "
            f"batch {event.batch}; {escape(event.reason)}"
        )
        self._console.print(f"[dim]{_HEADER}[/]")
        if self._console.is_terminal and not self._console.quiet:
            self._live = LiveView(self._console)

    def _show_step(self, event: StepEvent) -> None:
        text = (
            f"epoch {event.epoch}  loss {event.loss:.4f}  accuracy {event.accuracy:.1%}  "
            f"{event.samples_per_s:,.0f}/s  {self._time_left(event)} left"
        )
        if self._live is not None:
            self._live.show_step(text, event.step, event.steps)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(f"  step {event.step}/{event.steps}, {text}")

    def _time_left(self, event: StepEvent) -> timedelta:
        assert self._start is not None
        left = self._start.epochs * self._start.train_samples - event.samples
        return timedelta(seconds=round(max(left, 0) / event.samples_per_s))

    def _show_evaluation(self, event: EvaluationEvent) -> None:
        self._last_line = time.monotonic()
        self._console.print(
            f"{event.epoch:6}   {event.train_loss:10.4f}   {event.train_accuracy:9.2%}   "
            f"{event.test_loss:9.4f}   {event.test_accuracy:8.2%}   "
            f"{event.samples_per_s:9,.0f}   {event.seconds:6.1f} s"
        )


def make_track(console: Console) -> Track:
    """Return a tracker that shows a bar on a terminal and a line now and then elsewhere."""

    def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
        if total < 2 or console.quiet:
            yield from items
        elif console.is_terminal:
            with Progress(console=console, transient=True) as bar:
                yield from bar.track(items, total=total, description=description)
        else:
            yield from _with_lines(console, items, description, total)

    return track


def _with_lines(console: Console, items: Iterable[T], description: str, total: int) -> Iterator[T]:
    last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            console.print(f"{description}: {number:,} of {total:,}")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
