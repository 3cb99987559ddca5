"""No pickle in the package: neither imported nor reached through a function that unpickles."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "src/convoy").rglob("*.py"))
UNSAFE_CALLS = {"torch.load", "torch.save", "pickle.loads", "eval", "exec", "__import__"}
UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
UNPICKLING_NAMES = {("torch", "load"), ("torch", "save"), ("torch", "serialization")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_calls_what_could_run_foreign_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in UNSAFE_CALLS, f"{path}:{node.lineno}"
            for keyword in node.keywords:
                unsafe = keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                assert not unsafe, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_imports_what_unpickles_by_whatever_name(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = {node.module}
            names = {(node.module, alias.name) for alias in node.names}
            assert not names & UNPICKLING_NAMES, f"{path}:{node.lineno}"
        else:
            continue
        assert not {m.partition(".")[0] for m in modules} & UNPICKLERS, f"{path}:{node.lineno}"
        assert "torch.serialization" not in modules, f"{path}:{node.lineno}"


def test_the_sources_were_found() -> None:
    assert len(SOURCES) > 40
