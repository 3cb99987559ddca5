"""Draw the pictures of the documents from real runs.

python tools/draw_pictures.py terminal docs/images/train.svg
python tools/draw_pictures.py curve SUMMARY.json docs/images/cifar10-resnet20.png
python tools/draw_pictures.py claims BPT.json docs/images     # of: convoy bench bpt --json
python tools/draw_pictures.py staleness docs/results/staleness.json docs/images/staleness.png
"""

import io
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from rich.console import Console

from convoy.bench.plot import write_plot
from convoy.bench.report import Report, Row
from convoy.cli.train import print_summary
from convoy.config import load_config
from convoy.monitor.terminal import TerminalView
from convoy.trainer import train

CLAIMS = {
    "C1": ("unequal: all epochs", "unequal: accuracy"),
    "C4": ("cluster: IDPA + AGWU, all epochs",),
    "C5": ("unequal: to 70%", "unequal: epochs to 70%"),
    "C6": ("unequal: all epochs", "equal: all epochs", "stumbling: all epochs"),
    "C7": ("unequal: weights moved", "unequal: samples moved"),
    "C8": ("unequal: balance", "equal: balance"),
    "C9": ("unequal: waiting", "stumbling: waiting"),
}
MAIN_JOB = Path(__file__).parents[1] / "examples/unequal.toml"


def draw_terminal(target: Path) -> None:
    """Run the main job and draw what its terminal shows."""
    console = Console(record=True, width=84, file=io.StringIO(), highlight=False)
    console.print("[bold green]$[/] make train")
    with TemporaryDirectory() as folder:
        config = load_config(MAIN_JOB, {"out": f"{folder}/run"})
        run = train(config, sinks=[TerminalView(console)])
        print_summary(run, console, shown_folder=Path("runs/20261116-resnet20-fashion-mini"))
    console.save_svg(str(target), title="convoy train")


def draw_curve(source: Path, target: Path) -> None:
    """Draw a run's accuracy against time."""
    summary = json.loads(source.read_text())
    history = summary["history"]
    seconds = [record["seconds"] for record in history]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    for key, colour, name in (("train", "#999999", "training"), ("test", "#0072b2", "test")):
        values = [100 * record[f"{key}_accuracy"] for record in history]
        panel.plot(seconds, values, color=colour, label=f"{name}: {values[-1]:.2f} %")
    panel.axhline(90, color="#d55e00", linewidth=1, linestyle="--")
    panel.set(xlabel="seconds", ylabel="accuracy, %", ylim=(40, 100))
    panel.set_title(f"{summary['model']}, CIFAR-10 (JPEG), {len(history)} epochs", loc="left")
    panel.legend(loc="lower right")
    figure.savefig(target, dpi=150)


def draw_claims(source: Path, folder: Path) -> None:
    """Draw a picture for each claim of BPT-CNN from what `convoy bench bpt` has measured."""
    rows = json.loads(source.read_text())["rows"]
    for claim, tasks in CLAIMS.items():
        chosen = tuple(
            Row(row["task"], row["system"], row["unit"], tuple(row["values"]))
            for task in tasks
            for row in rows
            if row["task"] == task
        )
        write_plot(Report(f"bpt, claim {claim}", 0, chosen, ()), folder / f"bpt-{claim}.png")


def draw_staleness(source: Path, target: Path) -> None:
    """Draw what stale weights cost, network by network, and print it as a table's rows."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for run in json.loads(source.read_text()):
        stages = 2 * (len(run["cuts"]) + 1)
        found.setdefault((run["model"], stages, run["way"]), []).append(run["accuracy"])
    rows = [
        Row(model, way, "% right", tuple(values), x=stages)
        for (model, stages, way), values in found.items()
        if min(values) > 10  # those that diverged would hide the others
    ]
    # A network that was cut at one depth only gives no curve.
    drawn = tuple(row for row in rows if len({x for model, x, _ in found if model == row.task}) > 2)
    write_plot(Report("staleness", 0, drawn, (), "stages"), target)
    for (model, stages, way), values in found.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"{model} | {stages} | {way} | {each}: {statistics.mean(values):.2f}")


def main(kind: str, *names: str) -> None:
    """Draw one picture, or the pictures of one kind."""
    draw: dict[str, Callable[..., None]] = {
        "terminal": draw_terminal,
        "curve": draw_curve,
        "claims": draw_claims,
        "staleness": draw_staleness,
    }
    draw[kind](*(Path(name) for name in names))


if __name__ == "__main__":
    main(*sys.argv[1:])
