"""Draw the pictures of the documents from real runs.

python tools/draw_pictures.py terminal docs/images/train.svg
python tools/draw_pictures.py curve SUMMARY.json docs/images/cifar10-resnet20.png
"""

import io
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from rich.console import Console

from convoy.cli.train import print_summary
from convoy.config import load_config
from convoy.monitor.terminal import TerminalView
from convoy.trainer import train

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


def main(kind: str, *paths: str) -> None:
    """Draw one picture."""
    if kind == "terminal":
        draw_terminal(Path(paths[0]))
    else:
        draw_curve(Path(paths[0]), Path(paths[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
