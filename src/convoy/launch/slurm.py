"""A batch script for Slurm: the first machine leads and trains, the others join it."""

import re
import shlex
from dataclasses import dataclass

from convoy.errors import ConfigError

_NODES_AT_MOST = 64
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")
_PARTITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(,[A-Za-z0-9][A-Za-z0-9_.-]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What a batch script asks for.

    Attributes:
        run_file: the run's options; every machine must find it there.
        python: the interpreter that has Convoy; every machine must find it there.
        name: the job's name, and its run folder's below runs/.
        nodes: machines.
        partition, time: as Slurm's options of the same names.
        cpus, gpus: of each machine; 0 leaves it to Slurm.
    """

    run_file: str
    python: str
    name: str
    nodes: int
    partition: str | None = None
    time: str | None = None
    cpus: int = 0
    gpus: int = 0


def job_name(stem: str) -> str:
    """Return a name for a job that is also a plain folder's.

    >>> job_name("my run (2)"), job_name("...")
    ('my-run-2', 'convoy')
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem)[:60].strip("-") or "convoy"


def batch_script(job: SlurmJob) -> str:
    """Return the text of the script.

    Raises:
        ConfigError: Slurm could not make sense of a value.
    """
    _check(job)
    wanted = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus,
        "partition": job.partition,
        "time": job.time,
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "B:TERM@60",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value]
    body = _BODY.format(
        python=shlex.quote(job.python),
        run_file=shlex.quote(job.run_file),
        nodes=job.nodes,
        gpus=job.gpus,
    )
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", body])


def _check(job: SlurmJob) -> None:
    _check_range("nodes", job.nodes, 1, _NODES_AT_MOST)
    _check_range("cpus", job.cpus, 0, 4096)
    _check_range("gpus", job.gpus, 0, 64)
    if job.partition is not None and not _PARTITION.fullmatch(job.partition):
        raise ConfigError(
            "'partition' is no partition's name",
            got=job.partition,
            allowed="letters, digits, '-', '_' and '.'; several with ','",
        )
    if job.time is not None and not _TIME.fullmatch(job.time):
        raise ConfigError(
            "'time' is not as Slurm writes it", got=job.time, allowed="MINUTES, H:MM:SS or D-H:MM:SS"
        )
    for name, value in (("run file", job.run_file), ("interpreter", job.python)):
        if not value.isprintable():
            raise ConfigError(f"the {name}'s path cannot be printed", got=value)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"'{name}' is out of range", got=value, allowed=f"{low} to {high}")


# The batch shell alone is told of the end of the time (--signal=B), and asks the lead alone to
# stop: the others must stay for the last step, and go when the lead does.
_BODY = r"""
# Written by `convoy slurm`; submit it with sbatch, from a folder that all machines share.
# A requeued job goes on with runs/JOB-NAME; for another run give sbatch another --job-name.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

export CONVOY_PYTHON={python}
export CONVOY_RUN_FILE={run_file}
export CONVOY_RUN_FOLDER="runs/$SLURM_JOB_NAME"
export CONVOY_TOKEN_FILE="$PWD/.convoy-$SLURM_JOB_ID.token"
export CONVOY_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""
