"""A browser as bare as can be: it sends what a test says, byte for byte."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        (value,) = (value for key, value in self.headers if key == name)
        return value


def request(
    port: int, target: str = "/", method: str = "GET", headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a request's bytes; the target goes as it is, whatever is in it."""
    given = {"Host": f"127.0.0.1:{port}", "Connection": "close", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode()


def ask(
    port: int, target: str = "/", method: str = "GET", headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request and return the answer."""
    return ask_bytes(port, request(port, target, method, headers))


def ask_bytes(port: int, asked: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(asked)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    return read_answer(received)


def read_answer(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in rest)
    return Answer(int(first.split(" ")[1]), [(k.lower(), v) for k, _, v in pairs], body)


class Listener:
    """An open stream of server-sent events, which counts the messages."""

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._connection.sendall(request(port, "/api/stream", headers=headers))
        self._lines = self._connection.makefile("rb")
        self.count = 0
        self.status = int(self._lines.readline().split()[1])
        while self._lines.readline().strip():
            pass  # headers

    def line(self) -> str:
        """Return the next line that says something; chunks' sizes are passed over."""
        while True:
            received = self._lines.readline()
            assert received, "the stream has ended"
            text = received.decode().strip()
            if text.startswith(("data: ", ": ")):
                return text

    def message(self) -> dict[str, Any]:
        """Return the next message."""
        while not (text := self.line()).startswith("data: "):
            pass
        self.count += 1
        found = json.loads(text.removeprefix("data: "))
        assert isinstance(found, dict)
        return found

    def until_samples(self, samples: int) -> None:
        """Read until the run is told to have come so far."""
        while True:
            progress = self.message().get("sections", {}).get("progress", {})
            if (progress.get("samples") or 0) >= samples:
                return

    def close(self) -> None:
        self._lines.close()
        self._connection.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
