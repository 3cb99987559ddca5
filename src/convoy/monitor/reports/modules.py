"""JavaScript modules as one: what a module imports comes before it, and all names are known.

This is no parser. Modules import and export in these forms only, each on a line of its own, and no
two of them define the same name:

    import { a, b } from "./x.js";
    export function f() {            (also: async function, const, class)

Any other form is refused rather than guessed at: a page that fails in a reader's browser a year
from now could not be mended any more.
"""

import re
from collections.abc import Callable, Mapping

from convoy.errors import ConvoyError

_IMPORT = re.compile(r'import \{ ([\w$]+(?:, [\w$]+)*) \} from "\./([\w.-]+\.js)";')
_EXPORT = re.compile(r"export (?:(?:async )?function|const|class) ([\w$]+)")
_TOP_LEVEL = re.compile(r"^(?:(?:async )?function\*?|const|let|var|class) ([\w$]+)", re.MULTILINE)
_UNKNOWN_IMPORT = re.compile(r"^import\b|\bimport\s*\(|\bimport\.meta\b")


class BundleError(ConvoyError):
    """The files of a page cannot be put into one (exit code 1)."""


def join_modules(first: str, read: Callable[[str], str]) -> str:
    """Return a module and all that it imports as the text of one.

    Args:
        first: the module that starts the page.
        read: returns the text of a module.
    """
    joined: dict[str, str] = {}
    _add(first, read, joined, ())
    _check_names(joined)
    return "\n".join(f"// {name}\n{text}" for name, text in joined.items())


def _add(
    name: str, read: Callable[[str], str], joined: dict[str, str], above: tuple[str, ...]
) -> set[str]:
    """Add a module after what it imports, unless it is there; return what it exports."""
    if name in above:
        raise BundleError("modules import each other", got=" -> ".join((*above, name)))
    lines = read(name).splitlines()
    exported = {match[1] for match in map(_EXPORT.match, lines) if match}
    if name in joined:
        return exported
    kept = []
    for number, line in enumerate(lines, 1):
        wanted = _IMPORT.fullmatch(line)
        if wanted is None:
            kept.append(_bare(line, f"{name}, line {number}"))
            continue
        missing = set(wanted[1].split(", ")) - _add(wanted[2], read, joined, (*above, name))
        if missing:
            raise BundleError(f"{wanted[2]} exports no {min(missing)!r}", got=f"{name}: {line}")
    joined[name] = "\n".join(kept) + "\n"
    return exported


def _bare(line: str, place: str) -> str:
    """Return a line without the word that makes its name known to other modules."""
    word = line.strip()
    if _UNKNOWN_IMPORT.search(word):
        raise BundleError(f"this form of import is not known ({place})", got=word)
    if not re.match(r"export\b", word):
        return line
    if _EXPORT.match(line) is None:
        raise BundleError(f"this form of export is not known ({place})", got=word)
    return line.removeprefix("export ")


def _check_names(joined: Mapping[str, str]) -> None:
    owners: dict[str, str] = {}
    for module, text in joined.items():
        for name in _TOP_LEVEL.findall(text):
            if name in owners:
                raise BundleError(f"{owners[name]} and {module} both define {name!r}")
            owners[name] = module
