"""Samples on their way from the lead, which has the data set, to a node that does not.

A node asks for the samples that it was given and does not have. They come in chunks, each with
a checksum, and each is kept before the next is read: a broken connection costs one chunk.
"""

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import torch
from torch import Tensor

from convoy.data.card import SAMPLE_BYTES_AT_MOST, DataCard
from convoy.data.images import TrainTest
from convoy.data.pieces import Pieces
from convoy.errors import DataError, EnvironmentProblem
from convoy.launch import samples_pb2, wire_pb2
from convoy.launch.door import CHUNK_BYTES, bytes_of
from convoy.launch.reading import checked, decoder

CHANNEL_OPTIONS = [  # that a node's channel needs
    ("grpc.max_receive_message_length", SAMPLE_BYTES_AT_MOST + CHUNK_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),  # gRPC's own would outlast our patience
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_NUMBERS_AT_ONCE = 1 << 17  # 1 MiB of them in one request
_ROUNDS_AT_MOST = 4  # of asking for a chunk: once, and three times again
_PAUSE_FIRST_S, _PAUSE_AT_MOST_S = 0.1, 2.0
_NUMBER = np.dtype("<i8")
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}

CheckToken = Callable[[grpc.ServicerContext], None]
Tell = Callable[[int, int], None]


class SampleServer:
    """The lead's side: hands out the training images of a data set.

    Args:
        data: the data set.
        check_token: ends a call that may not be made; called before a request is looked at.
    """

    def __init__(self, data: TrainTest, check_token: CheckToken) -> None:
        self.card = DataCard.of(data)
        self._images = data.train
        self._check_token = check_token
        self._sent = _ByteCount()

    @property
    def sent_bytes(self) -> int:
        """Return how much was sent, to all nodes together."""
        return self._sent.total

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server needs to answer for us."""
        methods = {
            "Card": grpc.unary_unary_rpc_method_handler(
                checked(self._card), decoder(wire_pb2.Nothing), bytes_of
            ),
            "Send": grpc.unary_stream_rpc_method_handler(
                checked(self._send), decoder(samples_pb2.Wanted), bytes_of
            ),
        }
        return grpc.method_handlers_generic_handler("convoy.Samples", methods)

    def _card(
        self, request: wire_pb2.Nothing, context: grpc.ServicerContext
    ) -> samples_pb2.Description:
        del request
        self._check_token(context)
        return samples_pb2.Description(json=json.dumps(self.card.as_dict()))

    def _send(
        self, request: samples_pb2.Wanted, context: grpc.ServicerContext
    ) -> Iterator[samples_pb2.Sent]:
        self._check_token(context)
        try:
            numbers = self._wanted_numbers(request)
        except DataError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        for part in numbers.split(max(1, CHUNK_BYTES // self.card.sample_bytes)):
            sent = _pack(part, self._images.images_NCHW[part], self._images.labels[part])
            self._sent.add(sent.ByteSize())
            yield sent

    def _wanted_numbers(self, request: samples_pb2.Wanted) -> Tensor:
        if request.digest != self.card.digest:
            raise DataError("this is another data set", allowed=self.card.digest)
        if len(request.numbers) % _NUMBER.itemsize:
            raise DataError("torn sample numbers", got=f"{len(request.numbers)} bytes")
        numbers = np.frombuffer(request.numbers, _NUMBER).astype(np.int64)
        if len(numbers) > self.card.count:
            raise DataError(
                "more samples than there are", got=len(numbers), allowed=f"{self.card.count}"
            )
        self.card.check_numbers(numbers)
        return torch.from_numpy(numbers)


class SampleClient:
    """A node's side: fetches the samples it was given.

    Args:
        channel: to the lead, made with `CHANNEL_OPTIONS`.
        metadata: goes with each call; it holds the token.
        patience_s: how long to go on trying while nothing arrives.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        patience_s: float = 30.0,
    ) -> None:
        self._card = channel.unary_unary(
            "/convoy.Samples/Card",
            request_serializer=wire_pb2.Nothing.SerializeToString,
            response_deserializer=samples_pb2.Description.FromString,
        )
        self._send = channel.unary_stream(
            "/convoy.Samples/Send",
            request_serializer=samples_pb2.Wanted.SerializeToString,
            response_deserializer=samples_pb2.Sent.FromString,
        )
        self._metadata = metadata
        self._patience_s = patience_s
        self._received = _ByteCount()

    @property
    def received_bytes(self) -> int:
        """Return how much has arrived, damaged or not."""
        return self._received.total

    def card(self) -> DataCard:
        """Return what the lead's data set is.

        Raises:
            DataError: the lead refuses, or what it says makes no sense.
            EnvironmentProblem: the lead cannot be reached.
        """
        patience = _Patience(self._patience_s)
        while True:
            with patience.bear_failures():
                card = self._card(
                    wire_pb2.Nothing(), metadata=self._metadata, timeout=self._patience_s
                )
                return DataCard.from_dict(_parsed(card.json))

    def fetch(self, pieces: Pieces, indices: Tensor, tell: Tell | None = None) -> None:
        """Fetch those of some samples that are not here yet; return when all of them are.

        Args:
            pieces: keeps what arrives, chunk by chunk.
            indices: the samples' numbers.
            tell: called after each chunk with how many have arrived and how many were missing.

        Raises:
            DataError: the lead refuses, or the same samples arrive damaged time after time.
            EnvironmentProblem: the lead cannot be reached, or nothing arrives.
            StorageError: this machine's disk refuses them.
        """
        missing = pieces.missing(indices.unique())
        total, patience, rounds = len(missing), _Patience(self._patience_s), 0
        while len(missing):
            asked = missing[:_NUMBERS_AT_ONCE]
            with patience.bear_failures():
                for _ in self._receive(pieces, asked):
                    patience.renew()
                    if tell is not None:
                        tell(total - len(pieces.missing(missing)), total)
                # The stream is complete: what has not come now was damaged or left out.
                rounds = rounds + 1 if len(pieces.missing(asked)) else 0
            if rounds == _ROUNDS_AT_MOST:
                raise DataError(f"samples did not arrive whole, {rounds} times in a row")
            missing = pieces.missing(missing)

    def _receive(self, pieces: Pieces, numbers: Tensor) -> Iterator[None]:
        """Keep the samples that arrive whole, yielding after each chunk."""
        wanted = samples_pb2.Wanted(
            digest=pieces.card.digest, numbers=numbers.numpy().astype(_NUMBER).tobytes()
        )
        # A call that lasts longer than our patience is made again, for the rest: this is how a
        # lead is noticed that neither answers nor hangs up.
        call = self._send(wanted, metadata=self._metadata, timeout=self._patience_s)
        try:
            for sent in call:
                self._received.add(sent.ByteSize())
                if (samples := _unpack(sent, pieces.card)) is not None:
                    pieces.put(*samples)
                    yield
        finally:
            call.cancel()


class _Patience:
    """How long to go on after failures: as long as given, and anew after each success."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.renew()

    def renew(self) -> None:
        self._pause_s = _PAUSE_FIRST_S
        self._until = time.monotonic() + self._limit_s

    @contextlib.contextmanager
    def bear_failures(self) -> Iterator[None]:
        """Wait a little when a call fails, longer each time; raise when it is no use."""
        try:
            yield
        except grpc.RpcError as error:
            words = error.details() or error.code().name
            if error.code() in _REFUSALS:
                raise DataError(f"the lead refused to send its data: {words}") from None
            if time.monotonic() + self._pause_s > self._until:
                raise EnvironmentProblem(f"the lead's data did not arrive: {words}") from None
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_AT_MOST_S)


class _ByteCount:
    """A sum that several threads add to."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


def _pack(numbers: Tensor, images: Tensor, labels: Tensor) -> samples_pb2.Sent:
    sent = samples_pb2.Sent(
        numbers=numbers.numpy().astype(_NUMBER).tobytes(),
        images=images.numpy().tobytes(),
        labels=labels.numpy().astype(_NUMBER).tobytes(),
    )
    sent.checksum = _checksum(sent)
    return sent


def _unpack(sent: samples_pb2.Sent, card: DataCard) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a chunk's numbers, images and labels; None if it is not as it was sent."""
    count = len(sent.numbers) // _NUMBER.itemsize
    sizes = [len(part) for part in (sent.numbers, sent.images, sent.labels)]
    whole = [count * size for size in (_NUMBER.itemsize, card.sample_bytes, _NUMBER.itemsize)]
    if count == 0 or sizes != whole or _checksum(sent) != sent.checksum:
        return None
    numbers, labels = (
        torch.from_numpy(np.frombuffer(part, _NUMBER).astype(np.int64))
        for part in (sent.numbers, sent.labels)
    )
    # Torch takes no read-only memory.
    pixels = torch.frombuffer(bytearray(sent.images), dtype=getattr(torch, card.dtype))
    return numbers, pixels.view(count, *card.shape_CHW), labels


def _checksum(sent: samples_pb2.Sent) -> int:
    return zlib.crc32(sent.labels, zlib.crc32(sent.images, zlib.crc32(sent.numbers)))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise DataError("the lead's description of its data is not JSON") from None
