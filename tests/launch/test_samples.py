"""Samples travel once, whole, and only to whom they were given; what breaks is mended."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from convoy.data.card import DataCard
from convoy.data.images import ImageSet, TrainTest
from convoy.data.load import wrap_data
from convoy.data.pieces import Pieces
from convoy.errors import DataError, EnvironmentProblem
from convoy.launch import samples
from convoy.launch.samples import CHANNEL_OPTIONS, SampleClient, SampleServer
from convoy.launch.samples_pb2 import Description, Sent, Wanted
from convoy.launch.wire_pb2 import Nothing
from tests.data.test_pieces import flip_bit, make_card, make_samples

_TOKEN = (("convoy-token", "secret"),)
_COUNT = 600
_EVERYTHING = torch.arange(_COUNT)
_SAMPLE_BYTES = 3 * 16 * 16 + 16  # with its label and number
_CHUNK = 50  # samples

Meddle = Callable[[Iterator[Sent]], Iterator[Sent]]


def _check_token(context: grpc.ServicerContext) -> None:
    if dict(context.invocation_metadata()).get("convoy-token") != "secret":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")


def _data(dtype: str = "uint8") -> TrainTest:
    images = ImageSet(*make_samples(make_card(dtype=dtype)), ("a", "b", "c"))
    return wrap_data(images, images)


class Lead(grpc.ServerInterceptor):  # type: ignore[misc] # gRPC has no types
    """A lead that gives samples away, notes what it is asked for, and can be meddled with.

    Attributes:
        asked: how many samples each request was for.
        meddle: changes what is sent.
    """

    def __init__(self, data: TrainTest) -> None:
        self.asked: list[int] = []
        self.meddle: Meddle = iter
        self.samples = SampleServer(data, _check_token)
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = grpc.server(
            ThreadPoolExecutor(4), interceptors=[self], options=[("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers([self.samples.handler()])
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """End all calls and listen no longer."""
        self._server.stop(grace=None).wait()

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None or handler.unary_stream is None:
            return handler

        def send(request: Wanted, context: grpc.ServicerContext) -> Iterator[Sent]:
            self.asked.append(len(request.numbers) // 8)
            yield from self.meddle(handler.unary_stream(request, context))

        return grpc.unary_stream_rpc_method_handler(
            send, handler.request_deserializer, handler.response_serializer
        )


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "CHUNK_BYTES", _CHUNK * 3 * 16 * 16)


@pytest.fixture
def lead() -> Iterator[Lead]:
    lead = Lead(_data())
    yield lead
    lead.stop()


@pytest.fixture
def channel(lead: Lead) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{lead.port}", options=CHANNEL_OPTIONS) as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.Channel) -> SampleClient:
    return SampleClient(channel, _TOKEN)


@pytest.fixture
def pieces(lead: Lead) -> Pieces:
    return Pieces(Path("cache"), lead.samples.card)


def _assert_right(pieces: Pieces, numbers: Tensor, data: TrainTest | None = None) -> None:
    """See that these samples are here, and no other, and as the lead has them."""
    train = (data or _data()).train
    kept = pieces.image_set()
    assert torch.equal(kept.images_NCHW[numbers], train.images_NCHW[numbers])
    assert torch.equal(kept.labels[numbers], train.labels[numbers])
    missing = pieces.missing(_EVERYTHING)
    assert sorted([*missing.tolist(), *numbers.tolist()]) == _EVERYTHING.tolist()
    assert pieces.verify() == 0


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_samples_arrive_as_the_lead_has_them(dtype: str) -> None:
    data = _data(dtype)
    lead = Lead(data)
    with grpc.insecure_channel(f"127.0.0.1:{lead.port}") as channel:
        client = SampleClient(channel, _TOKEN)
        card = client.card()
        assert card == DataCard.of(data)
        pieces = Pieces(Path("cache"), card)
        client.fetch(pieces, _EVERYTHING)
        _assert_right(pieces, _EVERYTHING, data)
    lead.stop()


def test_only_what_was_asked_for_travels_and_only_once(
    lead: Lead, client: SampleClient, pieces: Pieces
) -> None:
    mine = torch.tensor([599, 4, 0, 4, 77])
    client.fetch(pieces, mine)
    _assert_right(pieces, mine.unique())
    assert lead.asked == [4]
    sent = lead.samples.sent_bytes
    assert 4 * _SAMPLE_BYTES < sent < 4 * _SAMPLE_BYTES + 50
    assert client.received_bytes == sent
    client.fetch(pieces, torch.tensor([0, 77]))
    assert (lead.asked, lead.samples.sent_bytes) == ([4], sent)
    client.fetch(pieces, torch.tensor([0, 77, 78]))
    assert lead.asked == [4, 1]
    assert lead.samples.sent_bytes < sent + _SAMPLE_BYTES + 50


def test_chunks_are_small_and_each_is_told(
    lead: Lead, client: SampleClient, pieces: Pieces
) -> None:
    sizes: list[int] = []

    def note(stream: Iterator[Sent]) -> Iterator[Sent]:
        for sent in stream:
            sizes.append(len(sent.images))
            yield sent

    lead.meddle, told = note, list[tuple[int, int]]()
    client.fetch(pieces, torch.arange(10))
    client.fetch(pieces, torch.arange(130), lambda *progress: told.append(progress))
    assert sizes == [size * 768 for size in (10, 50, 50, 20)]
    assert told == [(50, 120), (100, 120), (120, 120)]


def test_requests_are_cut_too(
    lead: Lead, client: SampleClient, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_NUMBERS_AT_ONCE", 250)
    client.fetch(pieces, _EVERYTHING)
    assert lead.asked == [250, 250, 100]
    _assert_right(pieces, _EVERYTHING)


def test_bytes_to_several_nodes_are_all_counted(lead: Lead, channel: grpc.Channel) -> None:
    client = SampleClient(channel, _TOKEN)

    def fetch(number: int) -> None:
        client.fetch(Pieces(Path(f"cache-{number}"), lead.samples.card), _EVERYTHING)

    nodes = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert lead.asked == [_COUNT] * 4
    assert client.received_bytes == lead.samples.sent_bytes > 4 * _COUNT * _SAMPLE_BYTES


# ---------------------------------------------------------------- what breaks


class Outage:
    """Stops a lead half-way through a request and starts it again, counting that it did."""

    def __init__(self, lead: Lead, pieces: Pieces) -> None:
        self._lead, self._pieces = lead, pieces
        self.fired = 0
        self.held: list[int] = []

    def __call__(self, stream: Iterator[Sent]) -> Iterator[Sent]:
        self.held.append(self._pieces.held)
        for number, sent in enumerate(stream):
            yield sent
            if number == 5 and self.fired == 0:
                self.fired += 1
                self._stop_after_some_arrived()

    def _stop_after_some_arrived(self) -> None:
        while self._pieces.held == 0:
            time.sleep(0.01)
        self._lead.stop()
        threading.Timer(0.3, self._lead.start).start()  # until then, attempts fail


def test_a_fetch_outlives_its_lead_and_asks_only_for_the_rest(
    lead: Lead, client: SampleClient, pieces: Pieces
) -> None:
    lead.meddle = outage = Outage(lead, pieces)
    client.fetch(pieces, _EVERYTHING)
    assert outage.fired == 1
    none, some = outage.held
    assert none == 0 < some < _COUNT
    assert lead.asked == [_COUNT, _COUNT - some]
    _assert_right(pieces, _EVERYTHING)


def test_a_node_that_starts_again_asks_only_for_the_rest(lead: Lead, channel: grpc.Channel) -> None:
    class KilledError(Exception):
        pass

    def die(arrived: int, total: int) -> None:
        if arrived == 200:
            raise KilledError

    with pytest.raises(KilledError):
        SampleClient(channel, _TOKEN).fetch(
            Pieces(Path("cache"), lead.samples.card), _EVERYTHING, die
        )
    pieces = Pieces(Path("cache"), lead.samples.card)
    client = SampleClient(channel, _TOKEN)
    client.fetch(pieces, _EVERYTHING)
    assert lead.asked == [600, 400]
    assert client.received_bytes < 400 * _SAMPLE_BYTES + 500
    _assert_right(pieces, _EVERYTHING)


def test_a_byte_flipped_on_disk_is_found_and_fetched_again(
    lead: Lead, client: SampleClient, pieces: Pieces
) -> None:
    client.fetch(pieces, _EVERYTHING)
    flip_bit(Path("cache/pieces") / pieces.card.digest / "images", 123 * 768 + 5)
    pieces = Pieces(Path("cache"), pieces.card)
    assert pieces.verify() == 1
    client.fetch(pieces, _EVERYTHING)
    assert lead.asked == [600, 1]
    _assert_right(pieces, _EVERYTHING)


class Damage:
    """Flips a bit in one field of some chunks, counting them."""

    def __init__(self, field: str, chunks: set[int]) -> None:
        self._field, self._chunks = field, chunks
        self._seen = self.fired = 0

    def __call__(self, stream: Iterator[Sent]) -> Iterator[Sent]:
        for sent in stream:
            if self._seen in self._chunks:
                self.fired += 1
                self._flip(sent)
            self._seen += 1
            yield sent

    def _flip(self, sent: Sent) -> None:
        value = getattr(sent, self._field)
        if isinstance(value, bytes):
            setattr(sent, self._field, bytes([value[0] ^ 1]) + value[1:])
        else:
            setattr(sent, self._field, value ^ 1)


@pytest.mark.parametrize("field", ["numbers", "images", "labels", "checksum"])
def test_a_bit_flipped_on_the_way_is_noticed_and_mended(
    lead: Lead, client: SampleClient, pieces: Pieces, field: str
) -> None:
    lead.meddle = damage = Damage(field, {0, 3})
    client.fetch(pieces, _EVERYTHING)
    assert damage.fired == 2
    assert lead.asked == [600, 100]
    _assert_right(pieces, _EVERYTHING)


def test_three_repeats_mend_a_chunk_and_a_fourth_is_not_tried(
    lead: Lead, client: SampleClient, pieces: Pieces
) -> None:
    lead.meddle = damage = Damage("images", {0, 1, 2})
    client.fetch(pieces, torch.arange(_CHUNK))
    assert lead.asked == [_CHUNK] * 4
    lead.meddle = damage = Damage("images", set(range(100)))
    with pytest.raises(DataError, match="did not arrive whole, 4 times in a row"):
        client.fetch(pieces, _EVERYTHING[-_CHUNK:])
    assert damage.fired == 4
    _assert_right(pieces, torch.arange(_CHUNK))


def _without_rows(sent: Sent) -> Sent:
    return Sent(checksum=0)


def _of_another_shape(sent: Sent) -> Sent:
    return samples._pack(
        torch.arange(2), torch.zeros(2, 5, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    )


@pytest.mark.parametrize("change", [_without_rows, _of_another_shape])
def test_a_lead_that_sends_something_else_is_not_asked_forever(
    lead: Lead, client: SampleClient, pieces: Pieces, change: Callable[[Sent], Sent]
) -> None:
    lead.meddle = lambda stream: (change(sent) for sent in stream)
    with pytest.raises(DataError, match="4 times in a row"):
        client.fetch(pieces, torch.arange(5))
    lead.meddle = lambda stream: iter([])
    with pytest.raises(DataError, match="4 times in a row"):
        client.fetch(pieces, torch.arange(5))
    assert pieces.held == 0


def test_a_lead_that_is_not_there_is_waited_for_but_not_for_long(
    lead: Lead, channel: grpc.Channel, pieces: Pieces
) -> None:
    lead.stop()
    client = SampleClient(channel, _TOKEN, patience_s=0.5)
    for attempt in (client.card, lambda: client.fetch(pieces, _EVERYTHING)):
        start = time.monotonic()
        with pytest.raises(EnvironmentProblem, match="did not arrive"):
            attempt()
        assert 0.2 < time.monotonic() - start < 3


def test_a_lead_that_falls_silent_is_given_up(
    lead: Lead, channel: grpc.Channel, pieces: Pieces
) -> None:
    over = threading.Event()

    def fall_silent(stream: Iterator[Sent]) -> Iterator[Sent]:
        yield next(stream)
        over.wait(10)

    lead.meddle = fall_silent
    client = SampleClient(channel, _TOKEN, patience_s=0.4)
    with pytest.raises(EnvironmentProblem, match=r"did not arrive: .*Deadline Exceeded"):
        client.fetch(pieces, torch.arange(_CHUNK + 1))
    over.set()
    _assert_right(pieces, torch.arange(_CHUNK))  # what came stays


def test_a_slow_lead_is_not_given_up(lead: Lead, channel: grpc.Channel, pieces: Pieces) -> None:
    def dawdle(stream: Iterator[Sent]) -> Iterator[Sent]:
        for sent in stream:
            time.sleep(0.25)
            yield sent

    lead.meddle = dawdle
    client = SampleClient(channel, _TOKEN, patience_s=1.0)
    client.fetch(pieces, torch.arange(6 * _CHUNK))
    assert len(lead.asked) > 1  # one call alone would have lasted longer than our patience
    assert sum(lead.asked) < 2 * 6 * _CHUNK
    _assert_right(pieces, torch.arange(6 * _CHUNK))


# ---------------------------------------------------------------- what is refused


def _refusal(channel: grpc.Channel, wanted: Wanted, token: Any = _TOKEN) -> grpc.RpcError:
    send = channel.unary_stream(
        "/convoy.Samples/Send",
        request_serializer=Wanted.SerializeToString,
        response_deserializer=Sent.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(send(wanted, metadata=token))
    return caught.value


def _packed(*numbers: int) -> bytes:
    return torch.tensor(numbers, dtype=torch.int64).numpy().tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": "cd" * 32}, "another data set"),
        ({"digest": ""}, "another data set"),
        ({"numbers": b"1234567"}, "torn sample numbers; got '7 bytes'"),
        ({"numbers": _packed(0, -1)}, "no sample has this number; got -1; allowed: 0 to 599"),
        ({"numbers": _packed(5, 600)}, "no sample has this number; got 600"),
        ({"numbers": _packed(*[1] * 601)}, "more samples than there are; got 601; allowed: 600"),
    ],
)
def test_bad_requests_are_refused(
    lead: Lead, channel: grpc.Channel, change: dict[str, Any], words: str
) -> None:
    asked = {"digest": lead.samples.card.digest, "numbers": _packed(1)} | change
    error = _refusal(channel, Wanted(**asked))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert lead.samples.sent_bytes == 0


def test_nothing_is_told_without_the_token(lead: Lead, channel: grpc.Channel) -> None:
    error = _refusal(channel, Wanted(digest="bad", numbers=b"bad"), token=())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    stranger = SampleClient(channel, (("convoy-token", "guess"),))
    with pytest.raises(DataError, match="refused to send its data: a token is needed"):
        stranger.card()
    assert lead.samples.sent_bytes == 0


def test_a_refused_node_does_not_ask_again(lead: Lead, client: SampleClient) -> None:
    card = dataclasses.replace(lead.samples.card, digest="cd" * 32)
    with pytest.raises(DataError, match="refused to send its data: this is another data set"):
        client.fetch(Pieces(Path("cache"), card), torch.arange(5))
    assert lead.asked == [5]


@pytest.mark.parametrize("text", ["", "{", json.dumps({"name": "x"})])
def test_a_card_that_makes_no_sense_is_refused(text: str) -> None:
    class Confused(SampleServer):
        def _card(self, request: Nothing, context: grpc.ServicerContext) -> Description:
            return Description(json=text)

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([Confused(_data(), _check_token).handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(DataError, match="descri"),
    ):
        SampleClient(channel, _TOKEN).card()
    server.stop(None).wait()
