"""Messages that cannot be read are refused by ourselves.

Where a decoder raises, gRPC keeps the call for ever, 17 KB of it. So a decoder gives back a mark
instead, and whoever meets the mark ends the call.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from convoy.errors import ConvoyError

_WORDS = "it was damaged on the way: it cannot be read"
_Message = TypeVar("_Message")


class _Unreadable:
    """A message that cannot be read."""


class UnreadableError(ConvoyError):
    """A message cannot be read."""


def decoder(message: Any, count: Callable[[], None] = lambda: None) -> Callable[[bytes], Any]:  # noqa: ANN401 - a message class
    """Return what reads messages of a class; `count` hears of those that cannot be read."""

    def decode(data: bytes) -> Any:  # noqa: ANN401
        try:
            return message.FromString(data)
        except DecodeError:
            count()
            return _Unreadable()

    return decode


def readable(messages: Iterator[_Message]) -> Iterator[_Message]:
    """Yield messages until one of them cannot be read."""
    for message in messages:
        if isinstance(message, _Unreadable):
            raise UnreadableError(_WORDS)
        yield message


def checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is not called with what cannot be read."""

    def checked_call(message: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401
        if isinstance(message, _Unreadable):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _WORDS)
        return call(message, context)

    return checked_call
