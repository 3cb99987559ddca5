"""A sample that counts as here is right, whoever writes, whatever is killed or damaged."""

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convoy.data.card import DataCard
from convoy.data.load import wrap_data
from convoy.data.pieces import Pieces
from convoy.errors import DataError, StorageError
from tests.conftest import make_stripes

_COUNT = 600


def make_card(**changes: Any) -> DataCard:
    """Return the card of a data set of small pictures."""
    card = DataCard(
        name="noise",
        digest="ab" * 32,
        count=_COUNT,
        shape_CHW=(3, 16, 16),
        dtype="uint8",
        classes=("a", "b", "c"),
        mean=(1.0, 2.0, 3.0),
        std=(1.0, 1.0, 1.0),
        augment="flip",
    )
    return dataclasses.replace(card, **changes)


def make_samples(card: DataCard) -> tuple[Tensor, Tensor]:
    """Return images and labels that follow from the sample's number, none of them black."""
    generator = torch.Generator().manual_seed(7)
    shape = (card.count, *card.shape_CHW)
    images = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, len(card.classes), (card.count,), generator=generator)
    return images.to(getattr(torch, card.dtype)), labels


def assert_all_right(pieces: Pieces) -> int:
    """Compare every sample that is here with what it should be; return how many there are."""
    images, labels = make_samples(pieces.card)
    everything = torch.arange(pieces.card.count)
    missing = pieces.missing(everything)
    here = everything[~torch.isin(everything, missing)]
    kept = pieces.image_set()
    assert torch.equal(kept.images_NCHW[here], images[here])
    assert torch.equal(kept.labels[here], labels[here])
    assert pieces.held == len(here)
    return len(here)


def put(pieces: Pieces, numbers: Tensor) -> None:
    """Put the right samples of these numbers."""
    images, labels = make_samples(pieces.card)
    pieces.put(numbers, images[numbers], labels[numbers])


def flip_bit(path: Path, place: int) -> None:
    """Change one bit of a file, in place as a bad disk would."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def _folder(card: DataCard) -> Path:
    return Path("cache/pieces") / card.digest


# ---------------------------------------------------------------- the card


def test_a_card_survives_json() -> None:
    card = make_card()
    assert DataCard.from_dict(json.loads(json.dumps(card.as_dict()))) == card


def test_a_card_describes_a_data_set() -> None:
    data = wrap_data(make_stripes(30), make_stripes(10))
    card = DataCard.of(data)
    assert (card.count, card.shape_CHW, card.dtype) == (30, (1, 12, 12), "uint8")
    assert (card.digest, card.classes) == (data.digest, ("left", "right"))
    assert (card.mean, card.std, card.augment) == (data.mean, data.std, "none")
    assert card.sample_bytes == 144


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("digest", "../../etc"),
        ("digest", "AB" * 32),
        ("count", 0),
        ("count", -1),
        ("count", 10**12),
        ("count", True),
        ("count", 1.5),
        ("shape_CHW", [3, 16]),
        ("shape_CHW", [3, 0, 16]),
        ("shape_CHW", [3, 1 << 20, 1 << 20]),
        ("shape_CHW", "333"),
        ("shape_CHW", 3),
        ("dtype", "float64"),
        ("dtype", []),
        ("classes", ["one"]),
        ("classes", [1, 2]),
        ("classes", "ab"),
        ("classes", {"a": 1, "b": 2}),
        ("mean", [1.0]),
        ("mean", [1.0, 2.0, float("nan")]),
        ("mean", [1.0, 2.0, 10**400]),
        ("mean", None),
        ("std", [1.0, 0.0, 1.0]),
        ("std", [1.0, 1.0, "1.0"]),
        ("augment", None),
    ],
)
def test_nonsense_makes_no_card(field: str, value: object) -> None:
    with pytest.raises(DataError, match=f"wrong: {field} is"):
        DataCard.from_dict(make_card().as_dict() | {field: value})


@pytest.mark.parametrize("values", [None, [], "card", {}, {**make_card().as_dict(), "more": 1}])
def test_other_values_make_no_card(values: object) -> None:
    with pytest.raises(DataError, match="does not describe"):
        DataCard.from_dict(values)


# ---------------------------------------------------------------- putting and finding


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_samples_come_back_as_they_were_put_in_another_life(dtype: str) -> None:
    card = make_card(dtype=dtype)
    numbers = torch.tensor([599, 0, 17])
    put(Pieces(Path("cache"), card), numbers)
    pieces = Pieces(Path("cache"), card)
    assert assert_all_right(pieces) == 3
    assert pieces.verify() == 0
    assert pieces.missing(torch.tensor([1, 0, 2, 599, 1])).tolist() == [1, 2, 1]
    assert pieces.image_set().images_NCHW.dtype == getattr(torch, dtype)
    assert pieces.image_set().classes == card.classes
    assert not pieces.image_set().images_NCHW[1].any()


def test_an_image_set_shows_what_is_put_later_and_never_writes() -> None:
    pieces = Pieces(Path("cache"), make_card())
    early = pieces.image_set()
    put(pieces, torch.tensor([5]))
    assert torch.equal(early.images_NCHW[5], make_samples(pieces.card)[0][5])
    early.images_NCHW.zero_()
    assert assert_all_right(Pieces(Path("cache"), pieces.card)) == 1


def test_a_sample_that_is_here_is_not_written_again() -> None:
    pieces = Pieces(Path("cache"), make_card())
    put(pieces, torch.tensor([5]))
    images, labels = make_samples(pieces.card)
    pieces.put(torch.tensor([5, 6]), 0 * images[5:7], labels[5:7])
    kept = pieces.image_set().images_NCHW
    assert torch.equal(kept[5], images[5])
    assert not kept[6].any()
    assert pieces.held == 2


_steps = st.tuples(
    st.sampled_from(["put", "damage", "reopen"]), st.lists(st.integers(0, 11), max_size=8)
)


@settings(deadline=None, max_examples=40)
@given(st.lists(_steps, max_size=6), st.lists(st.integers(0, 11), max_size=20))
def test_missing_is_all_that_was_not_put_or_was_damaged(
    steps: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    card, here = make_card(count=12, shape_CHW=(3, 2, 2)), set[int]()
    with tempfile.TemporaryDirectory() as cache:
        pieces = Pieces(Path(cache), card)
        for step, numbers in steps:
            if step == "put":
                put(pieces, torch.tensor(numbers, dtype=torch.int64))
                here.update(numbers)
            elif step == "damage":
                for number in set(numbers):
                    flip_bit(Path(cache, "pieces", card.digest, "images"), 12 * number + 5)
                # What is not here is black or damaged, and not looked at.
                assert pieces.verify() == len(here & set(numbers))
                here.difference_update(numbers)
            else:
                pieces = Pieces(Path(cache), card)
            assert assert_all_right(pieces) == len(here)
        missing = pieces.missing(torch.tensor(asked, dtype=torch.int64)).tolist()
        assert missing == [number for number in asked if number not in here]


@pytest.mark.parametrize("name", ["images", "labels", "checksums"])
def test_one_flipped_bit_is_found_and_only_its_sample_forgotten(name: str) -> None:
    card = make_card()
    pieces = Pieces(Path("cache"), card)
    put(pieces, torch.arange(100))
    path = _folder(card) / name
    flip_bit(path, 42 * (path.stat().st_size // _COUNT))
    assert pieces.verify() == 1
    assert pieces.missing(torch.arange(100)).tolist() == [42]
    put(pieces, torch.tensor([42]))
    assert pieces.verify() == 0
    assert assert_all_right(pieces) == 100


def test_a_presence_that_was_never_written_is_found() -> None:
    card = make_card()
    pieces = Pieces(Path("cache"), card)
    with (_folder(card) / "presence").open("r+b") as file:
        file.write(bytes([1, 2, 255]))  # only the first means anything
    assert pieces.held == 1
    assert pieces.verify() == 1
    assert pieces.held == 0


@pytest.mark.parametrize("number", [-1, _COUNT])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    pieces = Pieces(Path("cache"), make_card())
    images, labels = make_samples(pieces.card)
    with pytest.raises(DataError, match=f"got {number}; allowed: 0 to 599"):
        pieces.missing(torch.tensor([number]))
    with pytest.raises(DataError, match="no sample has this number"):
        pieces.put(torch.tensor([number]), images[:1], labels[:1])


def test_what_is_no_sample_of_the_set_is_refused() -> None:
    pieces = Pieces(Path("cache"), make_card())
    numbers, images, labels = torch.arange(2), *(t[:2] for t in make_samples(pieces.card))
    for wrong in (
        (numbers, images[:1], labels),
        (numbers, images.float(), labels),
        (numbers, images[:, :1], labels),
        (numbers, images, labels[:1]),
        (numbers, images, labels.int()),
        (numbers, images, labels + 3),
        (numbers, images, labels - 3),
    ):
        with pytest.raises(DataError):
            pieces.put(*wrong)
    assert pieces.held == 0


# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "change", [{"count": 700}, {"count": 500}, {"shape_CHW": (3, 32, 8)}, {"dtype": "float32"}]
)
def test_the_folder_of_another_card_is_begun_afresh(change: dict[str, Any]) -> None:
    former = Pieces(Path("cache"), make_card())
    put(former, torch.arange(50))
    other = Pieces(Path("cache"), make_card(**change))
    assert other.held == 0
    put(other, torch.arange(450, 480))
    # Whoever still uses the former goes on undisturbed, and disturbs nobody.
    put(former, torch.arange(440, 460))
    assert former.verify() == other.verify() == 0
    assert assert_all_right(former) == 70
    assert assert_all_right(Pieces(Path("cache"), other.card)) == 30
    assert {path.name for path in Path("cache/pieces").iterdir()} == {
        former.card.digest,
        f"{former.card.digest}.lock",
    }


@pytest.mark.parametrize("name", ["images", "labels", "presence", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_folder_that_lacks_something_is_begun_afresh(name: str, damage: str) -> None:
    put(Pieces(Path("cache"), make_card()), torch.arange(5))
    path = _folder(make_card()) / name
    path.unlink() if damage == "gone" else os.truncate(path, path.stat().st_size - 1)
    pieces = Pieces(Path("cache"), make_card())
    assert pieces.held == 0
    put(pieces, torch.arange(9))
    assert assert_all_right(pieces) == 9


def test_only_what_is_here_takes_room_even_of_more_than_fits_in_memory() -> None:
    # 3 TB: a map that reserved its size would be refused.
    pieces = Pieces(Path("cache"), make_card(count=1_000_000, shape_CHW=(3, 1000, 1000)))
    images = torch.full((1, 3, 1000, 1000), 9, dtype=torch.uint8)
    pieces.put(torch.tensor([999_999]), images, torch.tensor([2]))
    assert pieces.verify() == 0
    assert torch.equal(pieces.image_set().images_NCHW[-1:], images)
    blocks = sum(path.stat().st_blocks for path in _folder(pieces.card).iterdir())
    assert blocks * 512 < 4_000_000


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Let no file be written beyond 64 KiB, as if the disk were full."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_refuses_the_files_is_told() -> None:
    with _full_disk(), pytest.raises(StorageError, match="cannot be kept on this disk"):
        Pieces(Path("cache"), make_card())
    assert not _folder(make_card()).exists()


def test_samples_that_the_disk_refuses_do_not_count() -> None:
    pieces = Pieces(Path("cache"), make_card())
    put(pieces, torch.tensor([3]))
    # Each image has 768 bytes: the limit is within number 85, of which a part is written.
    with _full_disk(), pytest.raises(StorageError, match="cannot be kept on this disk"):
        put(pieces, torch.arange(80, 86))
    assert assert_all_right(pieces) == 1


def test_samples_are_on_the_disk_before_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(Path("cache"), make_card())
    story: list[tuple[str, str]] = []
    write, sync = os.pwrite, os.fdatasync

    def name_of(handle: int) -> str:
        return Path(f"/proc/self/fd/{handle}").readlink().name

    def noting_write(handle: int, content: bytes, place: int) -> int:
        story.append(("write", name_of(handle)))
        return write(handle, content, place)

    def noting_sync(handle: int) -> None:
        story.append(("sync", name_of(handle)))
        sync(handle)

    monkeypatch.setattr(os, "pwrite", noting_write)
    monkeypatch.setattr(os, "fdatasync", noting_sync)
    put(pieces, torch.tensor([8, 9]))
    columns = ("images", "labels", "checksums")
    assert story == [
        *[("write", name) for name in columns for _ in range(2)],
        *[("sync", name) for name in columns],
        *[("write", "presence")] * 2,
    ]


# ---------------------------------------------------------------- several processes


_WRITER = """
# Imports once, then becomes the writers of each line: "cache,seed,seconds;...". A writer fills
# its cache; given seconds to live, it has a slow disk, so that it is killed in the middle.
import os, signal, sys, time
from pathlib import Path
import torch
from tests.data.test_pieces import Pieces, make_card, make_samples

torch.set_num_threads(1)
images, labels = make_samples(make_card())
write = os.pwrite

def write_slowly(*arguments):
    time.sleep(0.0002)
    return write(*arguments)

def fill(cache, seed, begun):
    pieces = Pieces(cache, make_card())
    os.write(begun, b".")
    shuffled = torch.randperm(600, generator=torch.Generator().manual_seed(seed))
    for numbers in shuffled.split(20):
        pieces.put(numbers, images[numbers], labels[numbers])

def start(cache, seed, seconds):
    listen, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.pwrite = write_slowly if seconds > 0 else write
        fill(Path(cache), seed, begun)
        os._exit(0)
    os.read(listen, 1)
    return child

print("ready", flush=True)
for line in sys.stdin:
    orders = [order.split(",") for order in line.strip().split(";")]
    children = [start(cache, int(seed), float(seconds)) for cache, seed, seconds in orders]
    for child, (_, _, seconds) in zip(children, orders):
        if float(seconds) > 0:
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
    ends = [os.waitpid(child, 0)[1] for child in children]
    print(*(os.waitstatus_to_exitcode(end) for end in ends), flush=True)
"""


class Writers:
    """Processes that put samples, and are killed with -9 when told to."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, *orders: tuple[str, int, float]) -> list[int]:
        """Let one process for each (cache, seed, seconds to live) write; return how they end."""
        assert self._process.stdin is not None
        lines = (f"{Path(cache).absolute()},{seed},{after}" for cache, seed, after in orders)
        print(";".join(lines), file=self._process.stdin, flush=True)
        return [int(code) for code in self._answer().split()]

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    writers.close()


def test_a_killed_writer_leaves_no_wrong_sample(writers: Writers) -> None:
    moments, held = random.Random(3), []
    for seed in range(12):
        cache = f"cache-{seed}"
        assert writers.run((cache, seed, moments.uniform(0.01, 0.25))) == [-signal.SIGKILL]
        pieces = Pieces(Path(cache), make_card())
        assert pieces.verify() == 0
        held.append(assert_all_right(pieces))
    # Most were killed after some samples, else this has shown nothing.
    assert sum(0 < count < _COUNT for count in held) >= 3, held


def test_writers_at_once_do_not_harm_each_other(writers: Writers) -> None:
    codes = writers.run(("cache", 1, 0.0), ("cache", 2, 0.0), ("cache", 3, 0.01))
    assert codes[:2] == [0, 0]  # the third is killed, if there is anything left for it to do
    pieces = Pieces(Path("cache"), make_card())
    assert pieces.verify() == 0
    assert assert_all_right(pieces) == _COUNT


def test_who_decides_about_a_folder_is_waited_for() -> None:
    put(Pieces(Path("cache"), make_card()), torch.arange(5))
    waiting = threading.Thread(target=Pieces, args=(Path("cache"), make_card(count=700)))
    with Path(f"{_folder(make_card())}.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert (_folder(make_card()) / "presence").stat().st_size == _COUNT
    waiting.join(10)
    assert (_folder(make_card()) / "presence").stat().st_size == 700


def test_processes_that_open_at_once_share_one_folder(writers: Writers) -> None:
    put(Pieces(Path("cache"), make_card(count=50)), torch.arange(5))  # to be begun afresh
    assert writers.run(*[("cache", seed, 0.0) for seed in range(4)]) == [0] * 4
    assert assert_all_right(Pieces(Path("cache"), make_card())) == _COUNT
    assert len(list(Path("cache/pieces").iterdir())) == 2
