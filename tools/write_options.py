"""Write docs/options.md from the config, so that the two never differ.

python tools/write_options.py
"""

from itertools import groupby
from pathlib import Path
from typing import Literal, get_args, get_origin

from convoy.config import FIELDS, HINTS

TARGET = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Options

Written by `tools/write_options.py` from `src/convoy/config.py`; do not edit.

Every option has one name in three places: `lr = 0.1` in a run file, `--lr 0.1` on the command
line, `lr=0.1` in `convoy.fit`. A flag wins over a `CONVOY_LR` variable, which wins over the run
file. The effective values are saved in the run's `config.toml`, which can be run again as it is.

"On resume" marks what `--resume` may change; anything else would make it another run.
"""


def describe_type(name: str) -> str:
    """Return a field's type and range, in words."""
    hint, facts = HINTS[name], FIELDS[name].metadata
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return "numbers"
    kind = {int: "whole number", float: "number", bool: "true or false"}.get(hint, "text")
    named = facts["words"]
    low = facts["at_least"]
    while low in named.values():  # the words say it better
        low += 1
    bounds = {"from": low, "above": facts["above"], "to": facts["at_most"]}
    told = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    return ", ".join([*(f"`{word}`" for word in named), " ".join([kind, *told])])


def describe_default(name: str) -> str:
    """Return a default as it would be typed."""
    value, words = FIELDS[name].default, FIELDS[name].metadata["words"]
    if value in (None, ()):
        return ""
    for word, number in words.items():
        if number == value:
            return f"`{word}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    """Write the page."""
    lines = [HEAD]
    for group, names in groupby(FIELDS, key=lambda name: FIELDS[name].metadata["group"]):
        lines += [f"## {group}", "", "| option | meaning | values | default | on resume |"]
        lines.append("|---|---|---|---|---|")
        for name in names:
            field = FIELDS[name]
            may = "yes" if field.metadata["on_resume"] else ""
            default = describe_default(name)
            text = field.metadata["help"]
            lines.append(f"| `{name}` | {text} | {describe_type(name)} | {default} | {may} |")
        lines.append("")
    TARGET.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
