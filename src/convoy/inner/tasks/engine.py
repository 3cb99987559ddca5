"""The compiled engine: built on first use, kept for the next time, and told what to run."""

import contextlib
import fcntl
import functools
import os
import platform
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.instructions import Instruction, Program, Slot
from convoy.inner.tasks.tasks import FORWARD, Task

_SOURCES = (
    "direct.cpp",
    "engine.cpp",
    "norms.cpp",
    "pairs.cpp",
    "pool.cpp",
    "pooling.cpp",
    "winograd.cpp",
)
_FLAGS = (
    "-O3",
    "-march=native",
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
    "-fno-math-errno",
    "-fno-trapping-math",
    # Not among the linker's flags: there must be no second OpenMP beside the one torch brings.
    "-fopenmp",
)
# Python's own objects by the letters that calls.h reads.
_LETTERS = {bool: "b", int: "i", str: "t"}


class NoEngineError(Exception):
    """The engine cannot be built here; the text says why."""


@functools.cache
def load_engine() -> None:
    """Compile the engine, or take what was compiled before.

    Raises:
        NoEngineError: there is no compiler, or it failed.
    """
    # A ninja that came with the package lies beside the interpreter.
    beside = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), beside])
    try:
        _build()
    except Exception as error:  # a tool chain may fail in any way
        text = str(error).strip().split("\n", 1)[0]
        raise NoEngineError(f"the task engine could not be compiled ({text})") from error


def find_hands() -> Hands:
    """Return what this processor can do for our own convolutions."""
    load_engine()
    return Hands(torch.ops.convoy.vector_lanes(), torch.ops.convoy.matrix_tiles())


def _build() -> None:
    from torch.utils import cpp_extension

    version = torch.__version__.split("+")[0].replace(".", "_")
    name = f"convoy_engine_{version}_{_processor()}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder, here = Path(root, name), Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "convoy.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Torch's own lock outlives a process that is killed, and would be waited for without end.
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            name=name,
            sources=[str(here / source) for source in _SOURCES],
            extra_cflags=list(_FLAGS),
            build_directory=str(folder),
            is_python_module=False,
        )


def _processor() -> str:
    """Return a short name for what the processor can do: homes are shared by unlike machines."""
    known = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
    return f"{zlib.crc32(known.encode()):08x}"


class NativeEngine:
    """Runs a program's tasks on threads outside the interpreter lock."""

    def __init__(self, program: Program) -> None:
        load_engine()
        self._engine = torch.classes.convoy_engine.Engine(program.num_slots)
        for instruction in program.instructions:
            outs = [-1 if out is None else out for out in instruction.outs]
            name, _, overload = instruction.op._name.partition(".")
            self._engine.add_instruction(name, overload, encode(instruction), outs)
        for slot in program.results:
            self._engine.keep(slot)

    def form(self, tasks: Sequence[Task], priorities: Sequence[float]) -> None:
        """Take over which instructions make a task, and which tasks go first."""
        self._engine.clear_tasks()
        for task in tasks:
            self._engine.add_task(task.instructions, task.group, task.section)
        for number, task in enumerate(tasks):
            self._engine.add_edges(number, sorted(task.before))
        self._engine.set_priorities(list(priorities))

    def set(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        self._engine.set(slot, tensor)

    def get(self, slot: int) -> Tensor:
        """Return the tensor in a place."""
        found: Tensor = self._engine.get(slot)
        return found

    def run(self, threads: int, section: int = FORWARD) -> None:
        """Do a section of the step; the first one begins it."""
        pool = torch.get_num_threads()
        if threads > 1 or pool == 1:
            self._engine.run(threads, section)
            return
        torch.set_num_threads(1)  # one alone must not call others for help within an operation
        try:
            self._engine.run(1, section)
        finally:
            torch.set_num_threads(pool)

    def costs(self) -> list[float]:
        """Do the step on one thread; return the seconds of each instruction."""
        self._engine.profile()
        found: list[float] = self._engine.costs().tolist()
        return found

    def times(self) -> list[list[float]]:
        """Return thread, ready, start, end and time waited of each task in the last step."""
        found: list[list[float]] = self._engine.times().tolist()
        return found

    def helps(self) -> list[list[float]]:
        """Return thread, task, start and end of each piece that an idle thread did of a task."""
        found: list[list[float]] = self._engine.helps().tolist()
        return found


def encode(instruction: Instruction) -> str:
    """Write an instruction's arguments down as calls.h reads them, in the schema's order."""
    words = []
    for place, argument in enumerate(instruction.op._schema.arguments):
        if place < len(instruction.args):
            value = instruction.args[place]
        elif argument.name in instruction.kwargs:
            value = instruction.kwargs[argument.name]
        else:
            value = argument.default_value
        words.append(_encode_value(value, str(argument.type)))
    return " ".join(words)


def _encode_value(value: Any, type_name: str) -> str:
    if value is None:
        return "n"
    if isinstance(value, Slot):
        return f"s{value.number}"
    if isinstance(value, (list, tuple)):
        return _encode_list(list(value), type_name)
    if isinstance(value, float):
        return f"f{value!r}"
    if type(value) in _LETTERS:
        return f"{_LETTERS[type(value)]}{int(value) if value in (True, False) else value}"
    if isinstance(value, torch.device):
        return f"d{value}"
    if value in _TYPES:
        return f"i{_TYPES[value]}"
    if value in _LAYOUTS:
        return f"i{_LAYOUTS[value]}"
    if value in _FORMATS:
        return f"i{_FORMATS[value]}"
    raise NoEngineError(f"an argument cannot be handed over to the task engine ({value})")


def _encode_list(values: list[Any], type_name: str) -> str:
    if any(isinstance(value, Slot) for value in values) or "Tensor" in type_name:
        numbers = [value.number if isinstance(value, Slot) else -1 for value in values]
        return " ".join([f"S{len(numbers)}", *map(str, numbers)])
    if "bool" in type_name:
        return " ".join([f"B{len(values)}", *(str(int(value)) for value in values)])
    if "float" in type_name:
        return " ".join([f"F{len(values)}", *(repr(float(value)) for value in values)])
    return " ".join([f"I{len(values)}", *(str(int(value)) for value in values)])


# c10's numbers of these, which schemas pass as whole numbers.
_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}
_LAYOUTS = {torch.strided: 0}
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
