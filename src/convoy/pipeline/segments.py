"""When a pipeline is empty: which steps belong together, and which of them are pipelined.

Between two moments at which the whole network is wanted (an epoch's end, a checkpoint, the switch
of a hybrid run) lies a segment: its batches fill the pipeline, flow through it and drain from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import ConfigError

_PATIENCE = 3  # epochs without a gain
_GAIN = 0.001  # of accuracy; less is chance


@dataclass(frozen=True, slots=True)
class Switch:
    """When a run goes over from pipelined to plain, or the other way round.

    Attributes:
        at: the first step of the second part; None: when the test accuracy no longer rises.
        plain_first: which of the two comes first.
    """

    at: int | None
    plain_first: bool = False

    def is_pipelined(self, update: int, accuracies: Sequence[float]) -> bool:
        """Tell how a step is done, after epochs of these test accuracies."""
        over = has_stalled(accuracies) if self.at is None else update >= self.at
        return over == self.plain_first


def parse_switch(text: str, steps: int, *, plain_first: bool) -> Switch:
    """Read how much of a run of some steps is pipelined.

    >>> parse_switch("0.25", 1000, plain_first=False), parse_switch("1", 1000, plain_first=True)
    (Switch(at=250, plain_first=False), Switch(at=999, plain_first=True))

    Raises:
        ConfigError: it is no number and no word that is known.
    """
    if text == "plateau":
        return Switch(None, plain_first)
    try:
        number = float("inf") if text == "all" else float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        allowed = "all, plateau, a part below 1 or a number of steps"
        raise ConfigError("'pipelined' cannot be understood", got=text, allowed=allowed)
    pipelined = round(number * steps) if number < 1 else int(min(number, steps))
    return Switch(steps - pipelined if plain_first else pipelined, plain_first)


def has_stalled(accuracies: Sequence[float]) -> bool:
    """Tell whether at some point the test accuracy had not risen for some epochs.

    >>> has_stalled([0.5, 0.6, 0.6, 0.6]), has_stalled([0.5, 0.6, 0.6, 0.6, 0.6])
    (False, True)
    """
    best, since = 0.0, 0
    for accuracy in accuracies:
        best, since = (accuracy, 0) if accuracy > best + _GAIN else (best, since + 1)
        if since >= _PATIENCE:
            return True
    return False


def segment_steps(step: int, update: int, steps: int, every: int, switch: Switch) -> int:
    """Return how many steps it is to the next moment at which the pipeline must be empty.

    Args:
        step: of the epoch.
        update: the same step, of the whole run.
        steps: of an epoch.
        every: steps between two checkpoints; 0: only at the ends of epochs.
        switch: of the run.

    >>> segment_steps(90, 190, 100, 0, Switch(10**9)), segment_steps(90, 190, 100, 50, Switch(195))
    (10, 5)
    """
    left = [steps - step]
    if every:
        left.append(every - update % every)
    if switch.at is not None and switch.at > update:
        left.append(switch.at - update)
    return min(left)
