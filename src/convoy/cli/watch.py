"""`convoy watch`: look at a run in a browser, while it goes on or afterwards."""

import os
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from convoy.errors import ConfigError
from convoy.storage.runfolder import DEFAULT_ROOT, RunFolder, is_held

if TYPE_CHECKING:
    from socket import socket

    from convoy.monitor.dashboard.address import Address, Tls

_LEAST_URGENT = 10  # beside a training, the page takes only what that leaves


def watch(
    run: Path | None = None,
    /,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    certificate: Path | None = None,
    key_file: Path | None = None,
    open_: Annotated[bool, Parameter(name="--open", negative="")] = False,
    beside: Annotated[bool, Parameter(negative="", show=False)] = False,
) -> None:
    """Show a run as a live page, until Ctrl-C.

    The link that is printed works once, for one browser; then another is printed. Programs that
    read /metrics or /api/snapshot show the key that lies in ~/.cache/convoy/watch, under the
    run's name, as "Authorization: Bearer KEY".

    Parameters
    ----------
    run:
        The run's folder (default: the newest below runs/).
    port:
        Where the page is served (default: 8765, or the next port that is free).
    host:
        The address to serve it on. Away from loopback, TLS is needed.
    certificate:
        A PEM file for TLS, with --key-file.
    key_file:
        The certificate's key, a PEM file.
    open_:
        Open the page in a browser at once.
    beside:
        End with the process at the other end of standard input.
    """
    # The server takes a while to import: only now that it is asked for.
    from convoy.monitor.dashboard.address import Address, listen, read_tls, resolve

    folder = _find_run(run)
    tls = read_tls(certificate, key_file)
    ip = resolve(host, tls=tls is not None)
    listener = listen(ip, port)
    address = Address(host, ip, listener.getsockname()[1], is_encrypted=tls is not None)
    if beside:
        os.nice(_LEAST_URGENT)
    _show(folder, address, listener, tls, is_opened=open_, is_beside=beside)


def _show(
    folder: RunFolder,
    address: "Address",
    listener: "socket",
    tls: "Tls | None",
    *,
    is_opened: bool,
    is_beside: bool,
) -> None:
    """Serve a run's page until that is enough."""
    from convoy.files import default_cache_dir
    from convoy.monitor.dashboard.app import Pages, make_app
    from convoy.monitor.dashboard.assets import load_assets
    from convoy.monitor.dashboard.entry import Entry
    from convoy.monitor.dashboard.feed import Feed
    from convoy.monitor.dashboard.guard import make_gate
    from convoy.monitor.dashboard.key import key_path, read_or_make_key
    from convoy.monitor.dashboard.serve import serve
    from convoy.monitor.terminal import make_console

    name = folder.path.resolve().name
    console = make_console()

    def tell(link: str) -> None:
        console.print(f"watch {name}: {link}", markup=False, soft_wrap=True)

    key = read_or_make_key(key_path(default_cache_dir() / "watch", folder.path))
    gate = make_gate(address, key)
    feed = Feed(folder.events, name, lambda: is_held(folder.path))
    entry = Entry(address.base, tell)
    pages = Pages(feed, load_assets(), gate, entry, is_encrypted=address.is_encrypted)
    tell(entry.link)
    if is_opened:
        webbrowser.open(entry.link)
    serve(make_app(pages, gate), feed, listener, tls, is_beside=is_beside)


def _find_run(path: Path | None) -> RunFolder:
    """Return the run that is meant, or say why there is none."""
    if path is None:
        return _newest_run(DEFAULT_ROOT)
    if not path.is_dir():
        raise ConfigError(
            "there is no such run", got=str(path), hint="The list of runs: convoy runs list"
        )
    folder = RunFolder(path)
    if not any(file.is_file() for file in (folder.config, folder.events, path / ".lock")):
        raise ConfigError("this folder holds no run of Convoy", got=str(path))
    return folder


def _newest_run(root: Path) -> RunFolder:
    """Return the run that was last written to."""
    newest = max(_times(root), default=None)
    if newest is None:
        raise ConfigError(f"there is no run below {root}/", hint="Give a run's folder.")
    return RunFolder(newest[1])


def _times(root: Path) -> Iterator[tuple[float, Path]]:
    for events in root.glob("*/events.jsonl"):
        try:
            yield events.stat().st_mtime, events.parent
        except OSError:
            continue  # it was removed just now
