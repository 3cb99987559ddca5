"""`convoy join`: take part in a run that another machine leads."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console


def join(
    lead: str,
    /,
    *,
    token_file: Path,
    certificate: Path | None = None,
    name: str | None = None,
    device: str = "auto",
    threads: int = 0,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    stream_data: Annotated[bool, Parameter(negative="")] = False,
    reconnect_s: float = 300.0,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Take part in a run that another machine leads, until it is over.

    Ctrl-C leaves after the current step; the others go on. A lead that is lost is tried again,
    for it may be resumed.

    Parameters
    ----------
    lead:
        HOST:PORT, as the lead shows it.
    token_file:
        Holds the run's secret; a copy of the lead's file.
    certificate:
        A copy of the lead's certificate.pem, where it leads with --tls.
    name:
        What people call this node (default: the machine's name).
    device:
        auto, cpu, cuda or cuda:N.
    threads:
        CPU threads for the arithmetic (0: one a core).
    data_dir:
        Where the files of a named data set lie on this machine.
    cache_dir:
        Where decoded images are kept on this machine.
    stream_data:
        This machine does not have the data set: the lead sends the samples that it is given
        (with the strategies server, agwu and sgwu).
    reconnect_s:
        How long to try again when the lead cannot be reached.
    quiet:
        Show nothing.
    """
    from convoy.launch.quiet import quiet_engines
    from convoy.launch.serving import split_address
    from convoy.launch.token import read_token

    split_address(lead)
    token = read_token(token_file)
    pinned = None
    if certificate is not None:
        from convoy.launch.certificate import read_certificate

        pinned = read_certificate(certificate)
    console = Console(stderr=True, quiet=quiet, highlight=False)

    quiet_engines()
    # Torch takes two seconds to import: only once the options are known to be right.
    from convoy.inner.arithmetic import choose_device
    from convoy.launch.join import join as take_part
    from convoy.launch.link import host_name
    from convoy.launch.node import Order

    order = Order(
        lead=lead,
        token=token,
        name=name or host_name(),
        device=str(choose_device(device)),
        threads=threads,
        data_dir=str(data_dir) if data_dir else None,
        cache_dir=str(cache_dir) if cache_dir else None,
        certificate=pinned,
        stream_data=stream_data,
    )
    reason = take_part(order, reconnect_s=reconnect_s, tell=console.print)
    console.print(f"left: {reason}", markup=False)
