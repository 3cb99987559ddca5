"""How `convoy plan` shows a forecast: tables and a drawing for people, a record for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.config import Config
from convoy.inner.tasks.times import show_time
from convoy.pipeline.drawing import draw_paper, draw_text
from convoy.pipeline.forecast import Forecast, Situation
from convoy.pipeline.segments import parse_switch
from convoy.pipeline.timeline import Timeline

_WORDS = "behind: updates that weights are old; held: batches whose activations are kept"
_DRAWING = (
    "F2: forward pass of batch 2, taken for a third of a stage's time; B2: its backward pass; "
    "dots: waits"
)
_PAPER = "2K+1 workers; F2 v1: the forward pass of batch 2, with weights of 1 update"


def as_record(
    config: Config,
    situation: Situation,
    forecast: Forecast,
    timeline: Timeline,
    picture: Path | None,
) -> dict[str, Any]:
    """Return everything as plain values; stages are counted from 1, as people do."""
    names = ("model", "data", "batch", "device", "threads", "precision", "recipe")
    return {
        **{name: getattr(config, name) for name in names},
        "order": situation.recipe.order,
        "steps": situation.steps,
        **forecast.as_dict(),
        "hybrid_speedup": hybrid_speedup(config, situation, forecast),
        "timeline": [{**asdict(span), "stage": span.stage + 1} for span in timeline.spans],
        "file": str(picture) if picture is not None else None,
    }


def hybrid_speedup(config: Config, situation: Situation, forecast: Forecast) -> float | None:
    """Return the speed-up of a run that is pipelined in part; None: it is none, or none knows."""
    total = config.epochs * situation.steps
    at = parse_switch(config.pipelined, total, plain_first=config.plain_first).at
    if at is None:
        return None
    pipelined = total - at if config.plain_first else at
    return forecast.hybrid(pipelined, total) if pipelined < total else None


def print_forecast(
    config: Config,
    situation: Situation,
    forecast: Forecast,
    timeline: Timeline,
    *,
    paper: bool,
    picture: Path | None,
) -> None:
    """Print all that there is to see."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(config.model)}[/] on {escape(config.data)}, batch {config.batch}: "
        f"{_count(timeline.stages, 'stage')} by the recipe [bold]{escape(config.recipe)}[/] "
        f"(order {timeline.order})"
    )
    where = f"{config.device}, {_count(config.threads, 'thread')}, {config.precision}"
    console.print(f"[dim]measured here: {where}[/]\n")
    console.print(_stage_table(forecast))
    console.print(f"[dim]{_WORDS}[/]\n")
    console.print(_figures(config, situation, forecast))
    console.print()
    console.print(_order_table(forecast, timeline.order))
    console.print("[dim]held and behind: of stage 1; *: this recipe's order[/]\n")
    if paper:
        console.print(draw_paper(timeline.stages - 1, timeline.batches, console.width))
    else:
        console.print(draw_text(timeline, console.width))
    console.print(f"[dim]{_PAPER if paper else _DRAWING}[/]")
    if picture is not None:
        console.print(f"wrote {escape(str(picture))}", soft_wrap=True)


def _stage_table(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("blocks")
    links = any(stage.transfer_s for stage in forecast.stages)
    names = ["layers", "a batch", "work", "behind", "held", "memory", "sends"]
    for name in [*names, "in"] if links else names:
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(forecast.stages, start=1):
        blocks = stage.first if stage.first == stage.last else f"{stage.first} to {stage.last}"
        table.add_row(
            str(number),
            escape(blocks),
            str(stage.layers),
            show_time(stage.seconds),
            f"{stage.work:.1%}",
            str(stage.lead),
            str(stage.held),
            _size(stage.memory_bytes),
            _size(stage.sent_bytes) if stage.sent_bytes else "-",
            *([show_time(stage.transfer_s) if stage.transfer_s else "-"] if links else []),
        )
    return table


def _figures(config: Config, situation: Situation, forecast: Forecast) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    now = forecast.alone_s / forecast.batch_s
    rows = {
        "cut after": f"{_numbers(forecast.cuts)} weight layers" if forecast.cuts else "nowhere",
        "possible cuts": _numbers(forecast.legal),
        "one worker": f"{show_time(forecast.alone_s)} a batch",
        "slowest part": f"{show_time(forecast.slowest_s)}: at most {_times(forecast.bound)}",
        "this pipeline": f"{show_time(forecast.batch_s)} a batch: {_times(now)}; over an epoch of "
        f"{_count(situation.steps, 'batch', 'batches')}, with filling and draining, "
        f"{_times(forecast.speedup)}",
        "stale weights": f"{forecast.stale:.2%}, "
        f"by {_count(forecast.stages[0].lead, 'update')} at most",
        **_hybrid_row(config, situation, forecast),
        **_advice_row(config, situation, forecast),
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _hybrid_row(config: Config, situation: Situation, forecast: Forecast) -> dict[str, str]:
    if config.pipelined == "plateau":
        return {"hybrid": "pipelined until the accuracy no longer rises: nobody knows when"}
    speedup = hybrid_speedup(config, situation, forecast)
    if speedup is None:
        return {}
    return {"hybrid": f"{_times(speedup)}, the rest of the run being plain ({config.pipelined})"}


def _advice_row(config: Config, situation: Situation, forecast: Forecast) -> dict[str, str]:
    faster = forecast.faster_order(situation.recipe.order)
    if faster is not None:
        recipe = f"{config.recipe}{',' if ':' in config.recipe else ':'}order={faster.order}"
        return {"advice": f"{recipe} hides transfers: {_times(faster.speedup)}"}
    if forecast.speedup < 1:
        return {"advice": "one worker alone is faster than this pipeline"}
    return {}


def _order_table(forecast: Forecast, chosen: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("order")
    for name in ("parts", "a batch", "speed-up", "busy", "held", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for made in forecast.orders:
        ours = made.order == chosen
        table.add_row(
            f"{made.order} *" if ours else made.order,
            str(made.parts) if made.parts > 1 else "-",
            show_time(made.batch_s),
            f"{made.speedup:.2f}",
            f"{made.utilisation:.1%}",
            f"{made.held:.3g}",
            str(made.lead),
            style="bold" if ours else None,
        )
    return table


def _times(speedup: float) -> str:
    return f"{speedup:.2f} times as fast"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
