"""`convoy slurm`: write a batch script that trains on several machines of a cluster."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from convoy.config import load_config
from convoy.errors import ConfigError
from convoy.files import write_atomically


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """Take whole numbers only: left to itself the parser rounds 1.5 to 2."""
    del kind
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f'a whole number is needed, got "{tokens[0].value}"') from None


_WHOLE = Parameter(converter=_whole)


def slurm(
    run_file: Path,
    /,
    *,
    nodes: Annotated[int, _WHOLE],
    partition: str | None = None,
    time: str | None = None,
    cpus: Annotated[int, _WHOLE] = 0,
    gpus: Annotated[int, _WHOLE] = 0,
    out: Path | None = None,
) -> None:
    """Write a batch script for Slurm: the first machine leads and trains, the others join.

    Parameters
    ----------
    run_file:
        A TOML file with the run's options, which all machines can read.
    nodes:
        How many machines to ask for.
    partition:
        The partition to run in.
    time:
        The longest the job may take: 01:00:00
    cpus:
        Cores of each machine (0: as Slurm gives them).
    gpus:
        GPUs of each machine; every one trains.
    out:
        The file to write (default: print).
    """
    from convoy.launch.slurm import SlurmJob, batch_script, job_name

    load_config(run_file, {})
    path = run_file.resolve()
    text = batch_script(
        SlurmJob(
            run_file=str(path),
            python=sys.executable,
            name=job_name(path.stem),
            nodes=nodes,
            partition=partition,
            time=time,
            cpus=cpus,
            gpus=gpus,
        )
    )
    if out is None:
        print(text, end="")
        return
    if out.is_dir():
        raise ConfigError("the script cannot be written: it is a folder", got=str(out))
    try:
        write_atomically(out, text)
        out.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"the script cannot be written: {error}", got=str(out)) from None
    print(f"wrote {out}; submit it with: sbatch {out}", file=sys.stderr)
