"""The token that a node must know to join a run: 256 bits in a file that only its owner reads."""

import os
import re
import secrets
import stat
from pathlib import Path

from convoy.errors import ConfigError

# What can travel in a call's metadata, and what people's tools make: hexadecimal or base64.
_FORM = r"(?=.*[A-Za-z0-9])[A-Za-z0-9+/=_-]{16,}"


def make_token() -> str:
    """Return a new token."""
    return secrets.token_hex(32)


def read_or_make_token(path: Path) -> str:
    """Return the token in a file; a file that is not there is made, for its owner alone."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(f"the token file cannot be written: {error}", got=str(path)) from None
    token = make_token()
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
    return token


def read_token(path: Path) -> str:
    """Return the token in a file, which nobody but its owner may read."""
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file cannot be read: {error}", got=str(path)) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "others may read the token file", got=str(path), hint=f"Run: chmod 600 {path}"
        )
    if re.fullmatch(_FORM, token) is None:
        raise ConfigError(
            "the token file holds no token",
            got=str(path),
            allowed="at least 16 letters and digits, or base64",
        )
    return token
