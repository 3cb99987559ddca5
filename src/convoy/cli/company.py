"""What goes on beside a training run: the page that shows it, files for TensorBoard."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.monitor.events import Sink


@dataclass(frozen=True, slots=True)
class Company:
    """What was asked for.

    Attributes:
        watch: serve a page that shows the run.
        tensorboard: write files that TensorBoard reads.
        tell: takes a sentence for the user.
    """

    watch: bool
    tensorboard: bool
    tell: Callable[[str], None]

    @contextmanager
    def around(self, folder: Path) -> Iterator[Sequence[Sink]]:
        """Keep it going while a run in a folder lasts; give the sinks that belong to it."""
        sinks: list[Sink] = []
        with ExitStack() as stack:
            if self.tensorboard:
                from convoy.monitor.tensorboard import make_tensorboard_sink

                sinks.append(make_tensorboard_sink(folder / "tensorboard"))
            if self.watch:
                from convoy.monitor.dashboard.beside import watching

                stack.enter_context(watching(folder, None, self.tell))
            yield sinks
