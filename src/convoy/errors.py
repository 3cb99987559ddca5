"""Every error a user can meet, as one tree; each knows the exit code it ends the program with.

A message says what is wrong, what was given, what is allowed and what to do, in that order.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ConvoyError(Exception):
    """The run failed (exit code 1)."""

    exit_code = 1

    def __init__(
        self, what: str, *, got: object = None, allowed: str | None = None, hint: str | None = None
    ) -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got {got!r}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        message = "; ".join(parts)
        super().__init__(f"{message}. {hint}" if hint else message)


class ConfigError(ConvoyError):
    """An option, a name or a combination of options is wrong (exit code 2)."""

    exit_code = 2


class DataError(ConvoyError):
    """The data set is missing, damaged or has the wrong structure (exit code 2)."""

    exit_code = 2


class BadSampleError(ConvoyError):
    """More samples could not be read than the user allows (exit code 1)."""


class CheckpointError(ConvoyError):
    """A checkpoint is torn, damaged or belongs to something else (exit code 2)."""

    exit_code = 2


class StorageError(ConvoyError):
    """The disk refused what must be written (exit code 1)."""


class EnvironmentProblem(ConvoyError):  # noqa: N818 - "EnvironmentError" is Python's own name
    """This machine lacks something the command needs (exit code 3)."""

    exit_code = 3


class NotEnoughNodes(ConvoyError):  # noqa: N818 - it is an outcome, not a fault
    """Too few nodes are left for a run to go on (exit code 4)."""

    exit_code = 4


class Diverged(ConvoyError):  # noqa: N818 - it is an outcome, not a fault
    """Training has diverged: the loss is no number any more."""

    exit_code = 5


class Interrupted(ConvoyError):  # noqa: N818 - it is an outcome, not a fault
    """The user asked to stop; everything is saved (exit code 130)."""

    exit_code = 130


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """Return a sentence with the known name closest to a mistyped one, if any is close.

    >>> did_you_mean("epoch", ["epochs", "batch"])
    "Did you mean 'epochs'?"
    """
    close = get_close_matches(given, list(known), n=1)
    return f"Did you mean '{close[0]}'?" if close else None


def unknown_name(
    kind: str, given: str, known: Iterable[str], *, or_else: str | None = None
) -> ConfigError:
    """Return the error for a name that stands for nothing, listing those that do."""
    known = list(known)
    return ConfigError(
        f"unknown {kind}",
        got=given,
        allowed=", ".join([*known, or_else] if or_else else known),
        hint=did_you_mean(given, known),
    )
