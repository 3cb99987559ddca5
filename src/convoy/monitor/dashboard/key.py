"""The key of a run's page: 256 bits in a file of the user's, kept so that a page outlives a server.

Browsers never see it: they hold a cookie that is made from it. Scrapers of `/metrics` show it.
"""

import hmac
import logging
import os
import re
import secrets
import stat
from pathlib import Path

from convoy.files import digest_of_text, write_atomically

_FORM = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


def key_path(folder: Path, run: Path) -> Path:
    """Return where the key of a run's page lies, in the folder of all keys."""
    whole = run.resolve()
    return folder / f"{whole.name}-{digest_of_text(str(whole))[:16]}.key"


def read_or_make_key(path: Path) -> str:
    """Return the key in a file; one that is not there, or that others may know, is made anew.

    A disk that refuses it stops nobody from watching: pages then need another link after the
    server was started again.
    """
    known = _read(path)
    if known is not None:
        return known
    key = secrets.token_hex(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, key + "\n", mode=0o600)
    except OSError as error:
        _log.warning("the page's key cannot be kept in %s: %s", path, error)
    return key


def cookie_value(key: str, port: int) -> str:
    """Return what a browser shows instead of the key."""
    return hmac.digest(key.encode(), f"convoy page on port {port}".encode(), "sha256").hex()


def _read(path: Path) -> str | None:
    """Return the key in a file that is the user's own and that nobody else may read."""
    try:
        found = path.lstat()
        text = path.read_text(encoding="ascii").strip() if stat.S_ISREG(found.st_mode) else ""
    except (OSError, UnicodeDecodeError):
        return None
    is_private = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return text if is_private and _FORM.fullmatch(text) else None
