"""A page and all its files as one file, which needs nothing else and lets nothing else in.

`index.html` names its files in these forms only:

    <link rel="stylesheet" href="static/x.css">          becomes <style>
    <script src="static/x.js"></script>                  becomes <script>
    <script type="module" src="static/x.js"></script>    becomes one module, with all it imports
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convoy.monitor.reports.modules import BundleError, join_modules
from convoy.monitor.reports.policy import ELEMENT, as_data, with_policy

_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
_CLASSIC = re.compile(r'<script src="static/([^"]+)"></script>')
_MODULE = re.compile(r'<script type="module" src="static/([^"]+)"></script>')
_START = '<script type="module">'
# What lies outside the file, or what the policy would not let pass.
_OUTSIDE = re.compile(r'\s(?:src|href)=(?!"#|"data:)\S*|\s(?:style|on\w+)=\S*', re.IGNORECASE)
_CSS_OUTSIDE = re.compile(r"</style|@import|url\((?!['\"]?(?:data:|#))", re.IGNORECASE)
_SCRIPT_END = re.compile(r"</script|<script|<!--", re.IGNORECASE)


def bundle(folder: Path, data: Mapping[str, Any]) -> str:
    """Return the page of a folder as one file.

    Args:
        folder: holds `index.html` and all that it names.
        data: becomes the text of the element "snapshot", as JSON.
    """
    page = _read(folder, "index.html")
    page = _STYLE.sub(lambda m: f"<style>{_css(folder, m[1])}</style>", page)
    page = _CLASSIC.sub(lambda m: f"<script>{_script(folder, m[1])}</script>", page)
    page, modules = _MODULE.subn(lambda m: f"{_START}{_module(folder, m[1])}</script>", page)
    if modules != 1:
        raise BundleError("a page has one module that starts it", got=modules)
    _check_complete(page)
    snapshot = f'<script type="application/json" id="snapshot">{as_data(data)}</script>'
    return with_policy(page).replace(_START, f"{snapshot}\n{_START}") + _licences(folder)


def _check_complete(page: str) -> None:
    outside = _OUTSIDE.search(ELEMENT.sub("", page))  # what a script holds is its own affair
    if outside is not None:
        raise BundleError("the page refers to what a single file has not", got=outside[0].strip())


def _module(folder: Path, name: str) -> str:
    return join_modules(name, lambda each: _script(folder, each))


def _script(folder: Path, name: str) -> str:
    text = _read(folder, name)
    if _SCRIPT_END.search(text):
        raise BundleError("a script holds what would end or hide it in a page", got=name)
    return text


def _css(folder: Path, name: str) -> str:
    text = _read(folder, name)
    if _CSS_OUTSIDE.search(text):
        raise BundleError("a stylesheet refers to what a single file has not", got=name)
    return text


def _licences(folder: Path) -> str:
    """Return the licences of what the page has from others: they go where it goes."""
    texts = [path.read_text(encoding="utf-8").strip() for path in sorted(folder.rglob("LICENSE*"))]
    return "".join(f"<!--\n{text.replace('--', '- -')}\n-->\n" for text in texts)


def _read(folder: Path, name: str) -> str:
    try:
        # Line ends become \n, as they do in a browser before it compares digests.
        return (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(f"a file of the page cannot be read: {error}", got=name) from error
