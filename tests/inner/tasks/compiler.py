"""Small programs over the engine's sources, compiled as the tests need them."""

import shutil
import subprocess
from pathlib import Path

import convoy.inner.tasks as home

_SOURCES = Path(home.__file__).parent
_COMPILER = shutil.which("g++") or "c++"


def compile_with_engine(*args: str) -> None:
    """Run the compiler, which finds the engine's headers and warns of nothing."""
    how = [_COMPILER, "-std=c++17", "-Wall", "-Werror", "-Wno-psabi", f"-I{_SOURCES}"]
    subprocess.run([*how, *args], check=True, capture_output=True, text=True)
