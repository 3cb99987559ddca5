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
    values = {
        "@PYTHON@": shlex.quote(job.python),
        "@LEAD_FLAGS@": f" --cpus-per-task={job.cpus}" if job.cpus else "",
        "@NODES@": str(job.nodes),
        "@JOINING@": _joining(job),
        "@RUN_FILE@": shlex.quote(job.run_file),  # the last: what it holds is not looked at
    }
    body = _BODY
    for mark, value in values.items():
        body = body.replace(mark, value)
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
            "'time' is not as Slurm writes it",
            got=job.time,
            allowed="MINUTES, H:MM:SS or D-H:MM:SS",
        )
    for name, value in (("run file", job.run_file), ("interpreter", job.python)):
        if not value.isprintable():
            raise ConfigError(f"the {name}'s path cannot be printed", got=value)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"'{name}' is out of range", got=value, allowed=f"{low} to {high}")


def _joining(job: SlurmJob) -> str:
    """Return the commands that bring the other machines in: a node for each, or for each GPU."""
    others = job.nodes - 1
    if others == 0:
        return "others=\n"  # no process
    tasks = max(job.gpus, 1)
    flags = f"--nodes={others} --ntasks={others * tasks} --ntasks-per-node={tasks}"
    if job.cpus:
        flags += f" --cpus-per-task={max(1, job.cpus // tasks)}"
    command = '"$python" -m convoy join'
    if tasks > 1:
        flags += " --overcommit"
        command = f"bash -c '{_ONE_GPU}' \\\n  task {command}"
    return _JOIN.replace("@FLAGS@", flags).replace("@COMMAND@", command)


_ONE_GPU = 'exec "$@" --device "cuda:$SLURM_LOCALID" --name "$(uname -n)-$SLURM_LOCALID"'

_JOIN = """\
# shellcheck disable=SC2016 # the tasks shall expand it
srun @FLAGS@ --exclude="$host" \\
  @COMMAND@ "$address:$port" --token-file "$token" --reconnect-s 120 &
others=$!
"""

# The batch shell alone is told that the time is nearly over (--signal=B), and asks the lead
# alone to stop: the others must be there for the last step, and go when the lead does.
_BODY = """\

# Written by `convoy slurm`. Submit it with sbatch, from a folder that all machines share.
# A job that is requeued or submitted again goes on with the run in runs/JOB-NAME;
# for another run give sbatch another --job-name.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

python=@PYTHON@
run_file=@RUN_FILE@
out="runs/$SLURM_JOB_NAME"
token="$PWD/.convoy-$SLURM_JOB_ID.token"
port=$((20000 + SLURM_JOB_ID % 10000))

# The secret that a node must know to join.
trap 'rm -f "$token"' EXIT
rm -f "$token"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$token")

# The first machine leads; the others must know its address.
read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(getent ahostsv4 "$host")
case "$address" in
  127.*) read -r address _ < <(hostname -I) ;; # it knows itself by loopback only
esac

if compgen -G "$out/checkpoints/step-*" > /dev/null; then
  run=(--resume "$out")
else
  if [ -e "$out" ]; then # it came to no checkpoint
    mv "$out" "$out.$(date +%s)"
  fi
  run=("$run_file" --out "$out")
fi

srun --nodes=1 --ntasks=1@LEAD_FLAGS@ --nodelist="$host" \\
  "$python" -m convoy lead "${run[@]}" --host "$address" --port "$port" --token-file "$token" \\
  --trusted-network --nodes auto --min-nodes @NODES@ &
lead=$!
@JOINING@trap 'kill -TERM "$lead" 2> /dev/null || true' TERM INT

status=0
wait "$lead" || status=$?
while kill -0 "$lead" 2> /dev/null; do # a signal ended the wait, not the lead
  status=0
  wait "$lead" || status=$?
done
for _ in {1..10}; do # the others leave when the lead has
  kill -0 "$others" 2> /dev/null || break
  sleep 1
done
while kill -TERM "$others" 2> /dev/null; do sleep 1; done
exit "$status"
"""
