"""What the docstrings show is what the functions return."""

import doctest
import importlib
from pathlib import Path

import pytest

import convoy

_ROOT = Path(convoy.__file__).parent
_WITH_EXAMPLES = sorted(
    ".".join(["convoy", *path.relative_to(_ROOT).with_suffix("").parts])
    for path in _ROOT.rglob("*.py")
    if "\n    >>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", _WITH_EXAMPLES)
def test_examples_are_right(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
