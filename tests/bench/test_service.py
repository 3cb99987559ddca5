"""The benchmark of the parameter service: all ways carry what they are given."""

import pytest

from convoy.bench import service
from convoy.bench.peers.carriers import Load, open_gloo, open_socket
from convoy.launch.parameters.vectors import Coding

LOAD = Load(5_000, count=3, warm=1)


@pytest.mark.parametrize(
    ("coding", "tls", "in_place"),
    [("full", False, False), ("bf16", True, False), ("shared", False, True)],
)
@pytest.mark.parametrize("merges", [True, False])
def test_an_exchange_with_the_service_is_timed(
    coding: Coding, tls: bool, in_place: bool, merges: bool
) -> None:
    with service._open_ours(coding, tls=tls, in_place=in_place, merges=merges) as measure:
        seconds = measure(LOAD)
    assert len(seconds) == LOAD.count
    assert all(0 < s < 10 for s in seconds)


def test_the_peers_are_timed_in_the_same_way() -> None:
    for way in (open_socket(), open_gloo(), service._open_merge()):
        with way as measure:
            assert len(measure(LOAD)) == LOAD.count


def test_the_bars_compare_with_ray_size_by_size() -> None:
    loads = (Load(11_000_000, 1, 1), Load(75_000, 1, 1))
    values: service._Values = {
        ("44 MB", service._RAY): (30.0, 40.0),
        ("44 MB", service._SHARED): (10.0, 10.0),
        ("0.3 MB", service._RAY): (3.0, 3.0),
        ("0.3 MB", service._SHARED): (2.0, 2.0),
    }
    bars = service._bars(values, loads)
    assert [bar.value for bar in bars] == pytest.approx([1.5, 3.5])
    assert [bar.is_met for bar in bars] == [False, True]
    without = {key: found for key, found in values.items() if key[1] != service._RAY}
    assert service._bars(without, loads) == ()
