"""No pickle in the package: neither imported nor reached through a function that unpickles."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "src/convoy").rglob("*.py"))
UNSAFE_CALLS = {"torch.load", "torch.save", "pickle.loads", "eval", "exec"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_calls_what_could_run_foreign_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in UNSAFE_CALLS, f"{path}:{node.lineno}"
            for keyword in node.keywords:
                unsafe = keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                assert not unsafe, f"{path}:{node.lineno}"


def test_the_sources_were_found() -> None:
    assert len(SOURCES) > 40
