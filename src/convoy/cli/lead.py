"""`convoy lead`: lead a run that nodes of other machines can join."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from convoy.cli.options import Options, given_values
from convoy.cli.train import show_run, start_run
from convoy.config import SERVICE_STRATEGIES, load_config, read_toml
from convoy.errors import ConfigError

_GROUP = "Network"


def lead(
    run_file: Path | None = None,
    /,
    *,
    token_file: Annotated[Path, Parameter(group=_GROUP)],
    host: Annotated[str, Parameter(group=_GROUP)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=_GROUP)] = 29600,
    tls: Annotated[bool, Parameter(group=_GROUP, negative="")] = False,
    trusted_network: Annotated[bool, Parameter(group=_GROUP, negative="")] = False,
    options: Options | None = None,  # type: ignore[valid-type]
    resume: Annotated[Path | None, Parameter(group="Output")] = None,
    watch: Annotated[bool, Parameter(group="Output", negative="")] = False,
    tensorboard: Annotated[bool, Parameter(group="Output", negative="")] = False,
    json: Annotated[bool, Parameter(group="Output", negative="")] = False,
    quiet: Annotated[bool, Parameter(group="Output", negative="")] = False,
) -> None:
    """Lead a run that nodes of other machines can join.

    Starts --nodes nodes on this machine too, and waits for --min-nodes in all. On the other
    machines: convoy join HOST:PORT --token-file FILE

    Parameters
    ----------
    run_file:
        A TOML file with any of the options below: lr = 0.1
    token_file:
        Holds the secret that nodes must know to join; made if it is not there.
    host:
        This machine's address, as the other machines know it.
    port:
        The port to listen on.
    tls:
        Encrypt what nodes and lead say to each other. certificate.pem, made beside the token file,
        goes to the other machines too: convoy join ... --certificate FILE
    trusted_network:
        Leave loopback: everybody on that network may be trusted.
    resume:
        Go on with the run in this folder; nodes that wait for their lead come back.
    watch:
        Serve a page that shows the run while it goes on, on this machine only; its link is printed.
    tensorboard:
        Write the curves for TensorBoard too, into the run's folder.
    json:
        Print one JSON object about the run as the last line on standard output.
    quiet:
        Show no progress.
    """
    from convoy.launch.quiet import quiet_engines
    from convoy.launch.serving import make_serving
    from convoy.launch.token import read_or_make_token

    given = given_values(options)
    if resume is not None and run_file is not None:
        raise ConfigError("a resumed run has its own config", got=str(run_file))
    if resume is None:
        given = load_config(run_file, given).as_dict()
    # The parameter service's tensors travel in calls like the lead's own; lockstep's do not.
    serving = make_serving(
        host,
        port,
        trusted_network=trusted_network,
        tls=tls,
        private_tensors=_strategy(given, resume) in SERVICE_STRATEGIES,
    )
    serving = replace(serving, token=read_or_make_token(token_file))
    if tls:
        from convoy.launch.certificate import read_or_make_tls

        serving = replace(serving, tls=read_or_make_tls(token_file.parent, host))
    quiet_engines()
    run = start_run(
        given, resume, quiet=quiet, serving=serving, watch=watch, tensorboard=tensorboard
    )
    show_run(run, json=json, quiet=quiet)


def _strategy(given: dict[str, object], resume: Path | None) -> str:
    """Return the strategy of a run that starts, or of one that goes on."""
    if "strategy" in given or resume is None:
        return str(given.get("strategy", ""))
    path = resume / "config.toml"
    return str(read_toml(path).get("strategy", "")) if path.is_file() else ""
