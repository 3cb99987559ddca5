"""A file that grows is read line by line, whatever happens to it meanwhile."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.monitor.dashboard import tail as module
from convoy.monitor.dashboard.tail import Tail


def read_all(tail: Tail) -> list[bytes]:
    lines: list[bytes] = []
    while True:
        piece = tail.read()
        lines += piece.lines
        if piece.is_end:
            return lines


def test_a_file_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a")
    assert read_all(tail) == []
    (tmp_path / "a").write_bytes(b"one\n")
    assert read_all(tail) == [b"one"]
    tail.close()


def test_a_line_comes_when_it_is_complete(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a")
    with (tmp_path / "a").open("ab", buffering=0) as file:
        for part, expected in ((b"on", []), (b"e\ntw", [b"one"]), (b"", []), (b"o\n", [b"two"])):
            file.write(part)
            assert read_all(tail) == expected
    tail.close()


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_pieces_of_any_size_give_the_same_lines(parts: list[bytes], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", size)
        path = Path(folder) / "a"
        tail, lines = Tail(path), []
        with path.open("ab", buffering=0) as file:
            for part in parts:
                file.write(part)
                lines += read_all(tail)
        tail.close()
        assert lines == b"".join(parts).split(b"\n")[:-1]


def test_a_file_that_was_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\nthr")
    tail = Tail(path)
    assert read_all(tail) == [b"one", b"two"]
    path.write_bytes(b"new\n")
    piece = tail.read()
    assert (piece.lines, piece.is_anew) == ([b"new"], True)
    assert not tail.read().is_anew
    tail.close()


def test_a_file_in_another_ones_place_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    assert read_all(tail) == [b"one"]
    (tmp_path / "b").write_bytes(b"longer than before\n")
    (tmp_path / "b").replace(path)
    piece = tail.read()
    assert (piece.lines, piece.is_anew) == ([b"longer than before"], True)
    tail.close()


def test_a_file_that_was_removed_is_over(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    assert read_all(tail) == [b"one"]
    path.unlink()
    assert read_all(tail) == []
    tail.close()


def test_a_folder_of_that_name_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert read_all(Tail(tmp_path / "a")) == []


def test_memory_is_bounded_where_a_line_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINE_AT_MOST", 1 << 17)
    path = tmp_path / "a"
    path.write_bytes(b"x" * (1 << 19) + b"\nshort\n")
    tail = Tail(path)
    *damaged, last = read_all(tail)
    assert last == b"short"
    assert sum(map(len, damaged)) < 1 << 18
    tail.close()
