"""The page's own files, read once: what is not among them does not exist for a browser."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Asset:
    """A file as it is sent.

    Attributes:
        content: its bytes.
        media_type: what a browser is told it is.
        tag: changes with the content, so that a browser can ask whether its copy is still good.
    """

    content: bytes
    media_type: str
    tag: str


def load_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """Read every file of a folder that a page may ask for, by its path below the folder."""
    return {
        path.relative_to(folder).as_posix(): _load(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }


def _load(path: Path) -> Asset:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, _TYPES[path.suffix], tag)
