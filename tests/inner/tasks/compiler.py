"""Small programs over the engine's sources, compiled as the tests need them."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import convoy.inner.tasks as home

_SOURCES = Path(home.__file__).parent
_COMPILER = shutil.which("g++") or "c++"


@functools.cache
def has_thread_sanitizer() -> bool:
    """Tell whether programs can be built, and run, that find races by themselves."""
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch) / "empty.cpp", Path(scratch) / "empty"
        source.write_text("int main() {}")
        build = [_COMPILER, "-fsanitize=thread", str(source), "-o", str(program)]
        return not any(
            subprocess.run(command, check=False, capture_output=True).returncode
            for command in (build, [str(program)])
        )


def compile_with_engine(*args: str) -> None:
    """Run the compiler, which finds the engine's headers and warns of nothing."""
    how = [_COMPILER, "-std=c++17", "-Wall", "-Werror", "-Wno-psabi", f"-I{_SOURCES}"]
    subprocess.run([*how, *args], check=True, capture_output=True, text=True)
