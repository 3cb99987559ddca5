"""What a person sees: lines that fit, names that stay text, and silence when asked for."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    JoinEvent,
    LeaveEvent,
    NodesEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from convoy.monitor.terminal import TerminalView, make_console, make_track

WIDTH = 80


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("convoy.monitor.terminal.time.monotonic", clock)
    return clock


def make(*, terminal: bool, quiet: bool = False) -> tuple[Console, io.StringIO]:
    """Return a console that writes into memory."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=WIDTH, quiet=quiet, highlight=False)
    return console, text


def plain(text: str) -> str:
    """Return a text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def start(model: str = "lenet5", data: str = "fashion-mini") -> StartEvent:
    return StartEvent(
        model=model,
        parameters=14_728_266,
        data=data,
        train_samples=1_281_167,
        test_samples=50_000,
        epochs=15,
        batch=1024,
        strategy="single",
        executor="eager",
        device="cuda:0",
        precision="bf16",
        memory_format="channels_last",
        threads=16,
        from_step=0,
        reason="a new run",
    )


def step(number: int = 10, speed: float = 123_456.7) -> StepEvent:
    return StepEvent(
        epoch=12,
        step=number,
        steps=1252,
        samples=number * 1024,
        loss=6.9078,
        accuracy=0.9876,
        samples_per_s=speed,
        learning_rate=0.1,
    )


def evaluation() -> EvaluationEvent:
    return EvaluationEvent(
        epoch=120,
        samples=10_000_000,
        seconds=9876.5,
        train_loss=12.3456,
        train_accuracy=1.0,
        test_loss=12.3456,
        test_accuracy=1.0,
        samples_per_s=123_456.7,
    )


ALL: list[Event] = [
    start(),
    WarningEvent(reason="left out an image: " + "x" * 60 + " cannot be read " + "y" * 30),
    step(),
    CheckpointEvent(path="runs/x", step=3, reason="epoch 1"),
    evaluation(),
    EndEvent(state="finished", reason="all 15 epochs are done"),
]


def show(events: list[Event], *, terminal: bool, quiet: bool = False) -> str:
    """Return what is seen of some events."""
    console, text = make(terminal=terminal, quiet=quiet)
    view = TerminalView(console)
    for event in events:
        view.receive(event, 0.0)
    view.close()
    return text.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_every_line_fits_in_80_columns(*, terminal: bool) -> None:
    lines = plain(show(ALL, terminal=terminal)).replace("\r", "\n").splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert len(lines) >= 6


def test_header_and_rows_are_aligned() -> None:
    lines = show([start(), evaluation()], terminal=False).splitlines()
    header, row = lines[-2], lines[-1]
    for title, value in (
        ("epoch", "120"),
        ("train loss", "12.3456"),
        ("train acc", "100.00%"),
        ("samples/s", "123,457"),
    ):
        assert header.index(title) + len(title) == row.index(value) + len(value)


def test_start_row_and_end_are_told() -> None:
    seen = " ".join(show(ALL, terminal=False).split())
    assert (
        "lenet5 (14,728,266 weights) on fashion-mini: 1,281,167 images and 50,000 to test" in seen
    )
    assert "single, eager on cuda:0 (16 threads, bf16, channels_last); batch 1024" in seen
    assert "warning: left out an image:" in seen
    assert "finished: all 15 epochs are done" in seen


def test_without_a_terminal_there_are_no_escapes() -> None:
    assert "\x1b" not in show(ALL, terminal=False)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a[/b]", "[bold]", "back\\", "\\[x]"])
def test_markup_in_names_is_text(name: str, *, terminal: bool) -> None:
    events = [
        start(model=name, data=name),
        WarningEvent(reason=name),
        EndEvent(state="failed", reason=name),
    ]
    seen = plain(show(events, terminal=terminal))
    assert seen.count(name) == 4


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_nothing(*, terminal: bool) -> None:
    assert show(ALL, terminal=terminal, quiet=True) == ""


def test_without_a_terminal_there_is_one_line_per_interval(clock: Clock) -> None:
    console, text = make(terminal=False)
    view = TerminalView(console)
    view.receive(start(), 0.0)
    before = len(text.getvalue().splitlines())
    for number in range(1, 31):  # a step a second for 30 seconds
        clock.now += 1.0
        view.receive(step(number), 0.0)
    lines = text.getvalue().splitlines()[before:]
    assert [line.split(",")[0].strip() for line in lines] == [
        "step 10/1252",
        "step 20/1252",
        "step 30/1252",
    ]


def test_row_of_an_epoch_restarts_the_interval(clock: Clock) -> None:
    console, text = make(terminal=False)
    view = TerminalView(console)
    view.receive(start(), 0.0)
    clock.now += 9.0
    view.receive(evaluation(), 0.0)
    clock.now += 9.0
    view.receive(step(), 0.0)
    assert "step 10/1252" not in text.getvalue()


def test_time_left_follows_from_the_speed(clock: Clock) -> None:
    console, text = make(terminal=False)
    view = TerminalView(console)
    view.receive(start(), 0.0)
    clock.now += 10.0
    view.receive(step(number=1, speed=1000.0), 0.0)
    left_s = round((15 * 1_281_167 - 1024) / 1000)
    hours, rest = divmod(left_s, 3600)
    assert f"{hours}:{rest // 60:02}:{rest % 60:02} left" in text.getvalue()


def test_bar_on_a_terminal_shows_the_step_in_full() -> None:
    console, text = make(terminal=True)
    view = TerminalView(console)
    view.receive(start(), 0.0)
    view.receive(step(), 0.0)
    view.close()
    seen = plain(text.getvalue())
    assert "epoch 12  loss 6.9078  accuracy 98.8%  123,457/s" in seen
    assert "left" in seen
    assert "…" not in seen


def test_bar_is_gone_after_the_end_and_closing_twice_is_harmless() -> None:
    console, text = make(terminal=True)
    view = TerminalView(console)
    for event in (start(), step(), EndEvent(state="finished", reason="done")):
        view.receive(event, 0.0)
    size = len(text.getvalue())
    view.close()
    view.close()
    assert len(text.getvalue()) == size
    assert plain(text.getvalue()).rstrip().endswith("finished: done")


def test_console_for_people_is_standard_error() -> None:
    assert make_console().stderr
    assert make_console(quiet=True).quiet


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_track_passes_every_item_through(count: int, *, terminal: bool, quiet: bool) -> None:
    console, _ = make(terminal=terminal, quiet=quiet)
    assert list(make_track(console)(range(count), "reading", count)) == list(range(count))


def test_track_without_a_terminal_tells_a_line_per_interval(clock: Clock) -> None:
    console, text = make(terminal=False)
    for _ in make_track(console)(range(2000), "decoding", 2000):
        clock.now += 0.01
    assert text.getvalue().splitlines()[0].startswith("decoding: 1,0")
    assert len(text.getvalue().splitlines()) <= 2


@pytest.mark.parametrize("terminal", [False, True])
def test_track_of_one_item_or_when_quiet_shows_nothing(clock: Clock, *, terminal: bool) -> None:
    for count, quiet in ((1, False), (5, True)):
        console, text = make(terminal=terminal, quiet=quiet)
        for _ in make_track(console)(range(count), "reading", count):
            clock.now += 60.0
        assert text.getvalue() == ""


def test_track_on_a_terminal_shows_what_is_done() -> None:
    console, text = make(terminal=True)
    list(make_track(console)(range(5), "reading", 5))
    assert "reading" in plain(text.getvalue())


def crowd(count: int) -> list[Event]:
    """Return a run of some nodes; the last of them is lost."""
    numbers = list(range(count))
    speeds = [1000.0 * (number + 1) for number in numbers]
    joins = [
        JoinEvent(node=n, name=f"a machine with a long name {n}", pid=1, device="cpu", reason="")
        for n in numbers
    ]
    trained = NodesEvent(
        step=1,
        nodes=numbers,
        speeds=speeds,
        shares=[10] * count,
        samples=[10] * count,
        busy_s=[3.0] * count,
        waiting_s=[1.0] * count,
        exchange_s=0.0,
    )
    lost = LeaveEvent(node=count - 1, fault=True, reason="it went away")
    return [dataclasses.replace(start(), strategy="lockstep"), *joins, trained, lost, step()]


@pytest.mark.parametrize("count", [2, 40])
def test_the_live_view_shows_what_each_node_does(count: int) -> None:
    console, text = make(terminal=True)
    view = TerminalView(console)
    for event in crowd(count):
        view.receive(event, 0.0)
    assert view._live is not None
    view._live._live.refresh()
    seen = plain(text.getvalue())
    view.close()
    rows = [line for line in seen.replace("\r", "\n").splitlines() if "training" in line]
    assert rows
    assert all(len(line) <= WIDTH for line in rows)
    assert "1,000" in rows[0]
    assert f"{1 / count:.1%}" in rows[0]
    assert "25.0%" in rows[0]  # of its time it waits
    assert "lost" in seen  # of forty, sixteen fit, and this is one of them
    assert ("and 24 more" in seen) == (count == 40)


def test_one_node_needs_no_table() -> None:
    console, text = make(terminal=True)
    view = TerminalView(console)
    for event in (start(), step()):
        view.receive(event, 0.0)
    assert view._live is not None
    view._live._live.refresh()
    view.close()
    assert "faults" not in plain(text.getvalue())
