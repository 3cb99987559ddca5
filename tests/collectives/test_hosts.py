"""Which ranks share memory."""

import pytest

from convoy.collectives import hosts
from convoy.collectives.hosts import group_by_host, host_key, key_row


def test_a_machine_has_one_key_and_each_network_namespace_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = host_key()
    assert host_key() == ours
    monkeypatch.setattr("os.readlink", lambda path: f"{path} of another")
    assert host_key() != ours


def test_where_memory_cannot_be_shared_nobody_has_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert key_row("a").equal(key_row("a"))
    assert not key_row("a").equal(key_row("b"))
    monkeypatch.setattr(hosts, "is_possible", lambda: False)
    assert not key_row("a").equal(key_row("a"))


def test_a_crowd_is_split() -> None:
    groups = group_by_host([b"x"] * 70 + [b"y"])
    assert [len(ranks) for ranks in groups] == [64, 6, 1]
    assert sorted(sum(groups, ())) == list(range(71))
