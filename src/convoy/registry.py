"""Things a user chooses by a short name, and the door for things of the user's own."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from convoy.errors import ConfigError, did_you_mean, unknown_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One choice: where it lives ("module:attribute") and what it is, in a line."""

    target: str
    description: str


class Registry(Generic[T]):
    """Names and what they stand for; a target is imported only when it is asked for."""

    def __init__(self, kind: str, entries: dict[str, Entry]) -> None:
        self.kind = kind
        self._entries = entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def describe(self) -> dict[str, str]:
        """Return each name with its one-line description."""
        return {name: entry.description for name, entry in self._entries.items()}

    def check(self, name: str) -> None:
        """Refuse an unknown name, listing the known ones."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)

    def get(self, name: str) -> T:
        """Import and return what a name stands for."""
        self.check(name)
        return cast(T, _import_target(self._entries[name].target))


def _import_target(target: str) -> Any:  # noqa: ANN401 - the target may be anything
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def is_user_target(name: str) -> bool:
    """Tell whether a name has the form "module:callable"."""
    module, colon, attribute = name.partition(":")
    return (
        bool(colon)
        and attribute.isidentifier()
        and all(part.isidentifier() for part in module.split("."))
    )


def load_user_callable(target: str, kind: str) -> Callable[..., Any]:
    """Import a user's "module:callable"; the working directory is searched first.

    Raises:
        ConfigError: the module or the attribute does not exist, or cannot be called.
    """
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ConfigError(
            f"the {kind} '{target}' cannot be imported: {type(error).__name__}: {error}",
            hint="Give MODULE:CALLABLE, importable from the working directory.",
        ) from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"the module '{module_name}' has no '{attribute}'", hint=did_you_mean(attribute, names)
        )
    value = getattr(module, attribute)
    if not callable(value):
        raise ConfigError(f"the {kind} '{target}' is not callable", got=type(value).__name__)
    return cast(Callable[..., Any], value)
