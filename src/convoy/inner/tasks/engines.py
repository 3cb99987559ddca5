"""The engine that programs run on here: the compiled one where it can be had, else the portable."""

from collections.abc import Callable

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.engine import NativeEngine, NoEngineError, find_hands, load_engine
from convoy.inner.tasks.instructions import Program
from convoy.inner.tasks.portable import PortableEngine
from convoy.inner.tasks.step import Engine


class Engines:
    """Makes engines.

    Args:
        tell: takes a sentence for the user, where there is no compiler.
        portable: make those that need none.
    """

    def __init__(self, tell: Callable[[str], None], *, portable: bool = False) -> None:
        self._tell = tell
        self._portable = portable

    def prepare(self) -> None:
        """Compile the engine, or say once why it cannot be."""
        if self._portable:
            return
        try:
            load_engine()
        except NoEngineError as error:
            self._portable = True
            self._tell(f"{error}: tasks run one after the other, which is no faster than eager")

    def hands(self, arithmetic: Arithmetic) -> Hands:
        """Return what the processor can do for our own convolutions, in this arithmetic."""
        ours = not self._portable and arithmetic.layout == "channels_last"
        return find_hands() if ours else Hands()

    def make(self, program: Program) -> Engine:
        """Return an engine for a program."""
        return PortableEngine(program) if self._portable else NativeEngine(program)
