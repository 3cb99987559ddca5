"""The command `convoy`: finds the subcommand, and turns every mistake into one clear line."""

import logging
import os
import sys

import cyclopts

import convoy
from convoy.cli.bench import bench
from convoy.cli.doctor import doctor
from convoy.cli.join import join
from convoy.cli.lead import lead
from convoy.cli.plan import plan
from convoy.cli.replay import replay
from convoy.cli.report import report
from convoy.cli.runs import runs
from convoy.cli.slurm import slurm
from convoy.cli.trace import trace
from convoy.cli.train import train
from convoy.cli.watch import watch
from convoy.errors import ConfigError, ConvoyError, Interrupted

app = cyclopts.App(
    name="convoy",
    help="Train convolutional networks on machines that are not equal.",
    version=convoy.__version__,
    version_flags=["--version"],
)
app.command(train)
app.command(lead)
app.command(join)
app.command(slurm)
app.command(runs)
app.command(report)
app.command(watch)
app.command(replay)
app.command(plan)
app.command(trace)
app.command(bench)
app.command(doctor)


def main() -> None:
    """Run the program and leave with its exit code."""
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; mistakes are told on standard error."""
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        return _tell(str(error), ConfigError.exit_code)
    except ConvoyError as error:
        return _tell(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _tell("interrupted before training started", Interrupted.exit_code)
    except BrokenPipeError:
        # The reader of our output left early, as `| head` does. Nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def _tell(message: str, code: int) -> int:
    kind = "" if code == Interrupted.exit_code else "error: "
    print(f"convoy: {kind}{' '.join(message.split())}", file=sys.stderr)
    return code
