"""A node that was believed dead comes back; one that is shut out does not."""

import pytest

from convoy.launch import node
from convoy.launch.node import Order, run_node
from convoy.outer.server import FencedError, ShutOutError


def test_who_is_fenced_joins_again_and_who_is_shut_out_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [FencedError("believed dead"), FencedError("again"), ShutOutError("nonsense")]
    calls: list[Order] = []

    def once(order: Order) -> str:
        calls.append(order)
        raise ends[len(calls) - 1]

    monkeypatch.setattr(node, "_run_once", once)
    monkeypatch.setattr(node, "_NEWS_S", 0.0)
    with pytest.raises(ShutOutError):
        run_node(Order(lead="127.0.0.1:1", token="0" * 32, name="x"))
    assert len(calls) == 3
