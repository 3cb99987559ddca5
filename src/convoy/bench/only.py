"""A part of a long benchmark: the tasks that somebody asked for."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from convoy.errors import ConfigError

T = TypeVar("T")


def pick(tasks: Sequence[T], only: Sequence[str], label: Callable[[T], str]) -> tuple[T, ...]:
    """Return the tasks whose labels hold one of the texts; without any, all.

    >>> pick(["lenet5", "resnet20", "resnet56"], ["resnet5", "lenet"], str)
    ('lenet5', 'resnet56')

    Raises:
        ConfigError: there is no such task; says which there are.
    """
    found = tuple(task for task in tasks if not only or any(text in label(task) for text in only))
    if not found:
        raise ConfigError(
            "nothing of this benchmark is called so",
            got=", ".join(only),
            allowed="; ".join(label(task) for task in tasks),
        )
    return found
