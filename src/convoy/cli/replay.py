"""`convoy replay`: do a run with a parameter service again, and compare every bit."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from convoy.errors import CheckpointError, ConvoyError


def replay(run: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Compute an asynchronous run again from its record: the weights must be the same bits.

    The order of submissions is recorded; what was submitted is not, and is computed again. It
    takes as long as all nodes' work one after the other, on the same kind of device.

    Parameters
    ----------
    run:
        The run's folder.
    json:
        Print one JSON object as the last line on standard output.
    """
    from convoy.config import Config, read_toml
    from convoy.launch.parameters.replay import replay as do_again
    from convoy.monitor.terminal import make_console, make_track
    from convoy.storage.runfolder import RunFolder

    folder = RunFolder(run)
    if not folder.config.is_file():
        raise CheckpointError("this folder holds no run of Convoy", got=str(run))
    config = Config(**read_toml(folder.config))
    found = do_again(config, folder.record, make_track(make_console(quiet=json)))
    if json:
        print(json_format.dumps({**asdict(found), "equal": found.is_equal}))
    if not found.is_equal:
        raise ConvoyError(
            f"the weights differ at {len(found.differing)} of {found.compared} moments, "
            f"first at version {found.differing[0] if found.differing else '-'}",
            hint="A replay needs the same kind of device and the same PyTorch.",
        )
    if not json:
        Console(highlight=False).print(
            f"the same bits: {found.submissions:,} submissions computed again, "
            f"{found.compared} moments compared, {found.restarts} restarts of the service, "
            f"version {found.version}, checksum {found.checksum:08x}"
        )
