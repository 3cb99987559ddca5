"""The lead's list: a node that comes back has its number, and its work is counted once."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.launch.lockstep_lead import LockstepLead as Lead
from convoy.launch.roster import (
    NodeRecord,
    Roster,
    State,
    equal_shares_slowdown,
    summarise_nodes,
)
from convoy.launch.service import Connection
from convoy.outer.allocation.plan import Rules

STATES: list[State] = ["joining", "ready", "training", "aside", "silent", "gone"]


def _record(number: int, *, slot: int = -1, name: str = "", **values: Any) -> NodeRecord:
    return NodeRecord(
        **{
            "number": number,
            "identity": f"{number:04d}-x",
            "name": name or f"machine {number}",
            "slot": slot,
            "pid": 100 + number,
            "connection": None,
            "heard_at": 0.0,
            "state": "training",
            **values,
        }
    )


def _join(roster: Roster, slot: int, name: str = "elsewhere") -> NodeRecord:
    """Let a node in as the lead does."""
    record = _record(roster.next_number(slot, name), slot=slot, name=name)
    roster.add(record)
    return record


# ---------------------------------------------------------------- numbers


def test_the_leads_own_nodes_have_the_numbers_of_their_slots_in_whatever_order_they_come() -> None:
    roster = Roster()
    assert [_join(roster, slot).number for slot in (2, 0, 3, 1)] == [2, 0, 3, 1]


def test_nodes_from_elsewhere_have_the_next_numbers() -> None:
    roster = Roster()
    for slot in (0, 1):
        _join(roster, slot)
    assert [_join(roster, -1, name).number for name in ("a", "b", "c")] == [2, 3, 4]


def test_the_first_node_of_all_is_number_zero() -> None:
    assert Roster().next_number(-1, "a") == 0


def test_a_node_of_the_lead_that_comes_back_has_its_number_again() -> None:
    roster = Roster()
    for slot in range(3):
        _join(roster, slot)
    for _ in range(3):
        lost = roster.by_slot(1)
        assert lost is not None
        lost.state = "gone"
        assert _join(roster, 1).number == 1
    assert len(roster.records) == 6


def test_a_node_from_elsewhere_that_comes_back_by_name_has_its_number_again() -> None:
    roster = Roster()
    _join(roster, 0)
    first, second = _join(roster, -1, "a"), _join(roster, -1, "b")
    first.state = second.state = "gone"
    assert _join(roster, -1, "b").number == second.number
    assert _join(roster, -1, "a").number == first.number
    assert _join(roster, -1, "c").number == 3


def test_two_nodes_of_one_name_have_two_numbers() -> None:
    roster = Roster()
    assert [_join(roster, -1, "a").number for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("state", [state for state in STATES if state != "gone"])
def test_the_number_of_a_node_that_may_still_speak_is_given_to_nobody(state: State) -> None:
    roster = Roster()
    _join(roster, 0)
    _join(roster, -1, "a").state = state
    assert roster.next_number(-1, "a") == 2


def test_a_slot_whose_number_a_node_from_elsewhere_holds_has_another() -> None:
    roster = Roster()
    early = _join(roster, -1, "early")
    assert early.number == 0
    assert _join(roster, 0).number == 1


def test_the_number_of_a_node_from_elsewhere_that_is_gone_is_not_given_to_another() -> None:
    roster = Roster()
    early = _join(roster, -1, "early")
    early.state, early.samples = "gone", 100
    _join(roster, 0, "node 1")
    assert [record.samples for record in roster.latest()] == [100, 0]


@given(
    moves=st.lists(
        st.tuples(st.sampled_from([-1, 0, 1, 2]), st.sampled_from("abc"), st.booleans()),
        max_size=20,
    )
)
def test_no_two_nodes_that_are_here_share_a_number(moves: list[tuple[int, str, bool]]) -> None:
    roster = Roster()
    for slot, name, goes in moves:
        before = roster.by_slot(slot) if slot >= 0 else None
        if before is not None:
            before.state = "gone"  # a slot has one process at a time
        record = _join(roster, slot, f"own {slot}" if slot >= 0 else name)
        if goes:
            record.state = "gone"
        numbers = [r.number for r in roster.records if r.state != "gone"]
        assert len(numbers) == len(set(numbers))


# ---------------------------------------------------------------- finding


def test_a_node_is_found_by_connection_slot_number_and_state() -> None:
    one, two = Connection("127.0.0.1"), Connection("127.0.0.1")
    first = _record(0, slot=0, connection=one, state="gone")
    again = _record(0, slot=0, connection=two)
    other = _record(1, state="aside")
    roster = Roster([first, again, other])
    assert roster.by_connection(one) is first
    assert roster.by_connection(two) is again
    assert roster.by_connection(Connection("127.0.0.1")) is None
    assert roster.by_slot(0) is again
    assert roster.by_slot(1) is None
    assert roster.by_number(0) is again
    assert roster.by_number(2) is None
    assert roster.in_state("training", "aside") == [again, other]
    assert roster.in_state("silent") == []


@pytest.mark.parametrize("state", STATES)
def test_a_node_is_here_unless_it_is_gone_or_silent(state: State) -> None:
    assert _record(0, state=state).is_here == (state not in ("gone", "silent"))


def test_people_count_nodes_from_one() -> None:
    assert _record(0).label == "node 1"
    assert _record(3).summary()["node"] == 4


# ---------------------------------------------------------------- sums


def test_the_starts_of_a_node_add_up_and_the_last_tells_the_rest() -> None:
    started = _record(
        0, pid=1, state="gone", speed=50.0, samples=100, busy_s=2.0, waiting_s=1.0, faults=1
    )
    again = _record(
        0, pid=2, state="gone", speed=60.0, samples=10, busy_s=0.5, waiting_s=0.25, faults=1
    )
    last = _record(0, pid=3, speed=70.0, share=8, samples=1, busy_s=0.125, waiting_s=0.0)
    (sums,) = Roster([started, again, last]).latest()
    assert (sums.samples, sums.busy_s, sums.waiting_s, sums.faults) == (111, 2.625, 1.25, 2)
    assert (sums.pid, sums.state, sums.speed, sums.share) == (3, "training", 70.0, 8)


def test_adding_up_leaves_the_records_as_they_are() -> None:
    roster = Roster([_record(0, samples=5, state="gone"), _record(0, samples=7)])
    for _ in range(3):
        assert [record.samples for record in roster.latest()] == [12]
    assert [record.samples for record in roster.records] == [5, 7]


def test_a_node_that_was_not_measured_again_keeps_its_speed() -> None:
    (record,) = Roster([_record(0, speed=50.0, state="gone"), _record(0)]).latest()
    assert record.speed == 50.0


def test_the_latest_records_are_in_the_order_of_numbers() -> None:
    roster = Roster([_record(2), _record(0, state="gone"), _record(1), _record(0)])
    assert [record.number for record in roster.latest()] == [0, 1, 2]
    assert Roster().latest() == []


# ---------------------------------------------------------------- summaries


def test_a_nodes_summary_in_plain_values() -> None:
    record = _record(
        1,
        name="attic",
        device="cpu",
        state="aside",
        speed=12.345,
        samples=640,
        busy_s=3.0,
        waiting_s=1.0,
        faults=2,
        why="too slow",
    )
    assert record.summary() == {
        "node": 2,
        "name": "attic",
        "device": "cpu",
        "state": "aside",
        "speed": 12.3,
        "samples": 640,
        "waiting": 0.25,
        "faults": 2,
        "reason": "too slow",
    }
    assert _record(0).summary()["waiting"] == 0.0


def test_the_summary_of_all_nodes() -> None:
    roster = Roster(
        [
            _record(0, probed=90.0, samples=500, busy_s=9.0, waiting_s=1.0, state="gone", faults=1),
            _record(1, speed=20.0, probed=10.0, samples=200, busy_s=10.0, waiting_s=0.0),
            _record(0, speed=80.0, samples=300, busy_s=9.0, waiting_s=1.0),
            _record(2, speed=1.0, probed=5.0),
        ],
        exchange_s=0.0123456,
    )
    summary = summarise_nodes(roster)
    table = summary.pop("node_table")
    assert summary == {
        "nodes": 3,
        "shares": [0.8, 0.2, 0.0],
        "speeds": [80.0, 20.0, 1.0],
        "idle_fraction": round(2 / 30, 4),
        "faults": 1,
        "exchange_s": 0.01235,
        "equal_shares_slowdown": round(1000 / (3 * 5.0) / 20, 3),
    }
    assert [row["node"] for row in table] == [1, 2, 3]
    assert table[0]["samples"] == 800


def test_the_summary_of_nobody() -> None:
    assert summarise_nodes(Roster()) == {
        "nodes": 0,
        "shares": [],
        "speeds": [],
        "idle_fraction": 0.0,
        "faults": 0,
        "exchange_s": 0.0,
        "equal_shares_slowdown": None,
        "node_table": [],
    }


def test_nodes_that_have_not_trained_yet_have_no_share_of_anything() -> None:
    summary = summarise_nodes(Roster([_record(0), _record(1)]))
    assert summary["shares"] == [0.0, 0.0]
    assert summary["equal_shares_slowdown"] is None


def _trained(probed: list[float], *, samples: int, took_s: float) -> list[NodeRecord]:
    """Return nodes that together trained so many samples in so long."""
    whole = sum(probed)
    return [
        _record(n, probed=speed, samples=round(samples * speed / whole), busy_s=took_s)
        for n, speed in enumerate(probed)
    ]


@pytest.mark.parametrize(
    ("probed", "samples_per_s", "slowdown"),
    [
        ([80.0, 60.0, 40.0, 20.0], 200, 2.5),
        ([80.0, 60.0, 40.0, 20.0], 160, 2.0),  # an exchange that costs a fifth
        ([50.0, 50.0], 100, 1.0),
        ([50.0, 50.0], 0, None),  # nobody has trained yet
    ],
)
def test_with_equal_shares_all_go_at_the_pace_of_the_slowest(
    probed: list[float], samples_per_s: int, slowdown: float | None
) -> None:
    records = _trained(probed, samples=samples_per_s * 40, took_s=40.0)
    assert equal_shares_slowdown(records) == slowdown


def test_with_equal_shares_nobody_may_stand_aside() -> None:
    fast, slow = _trained([50.0, 1.0], samples=4000, took_s=40.0)
    fast.samples, slow.samples = 4000, 0
    assert equal_shares_slowdown([fast, slow]) == 50.0


def test_an_unlucky_probe_does_not_make_equal_shares_look_worse() -> None:
    records = _trained([80.0, 20.0], samples=4000, took_s=40.0)
    slow = records[1]
    slow.samples = 1200  # 30 per second, when it trained
    assert equal_shares_slowdown(records) == round(4400 / 60 / 40, 3)


def test_nobody_needs_no_time() -> None:
    assert equal_shares_slowdown([]) is None


def test_who_is_sent_away_again_and_again_rests_longer_each_time() -> None:
    record = _record(0)
    assert record.rests_until == 0.0
    rests = []
    for _ in range(12):
        record.rest(100.0)
        rests.append(record.rests_until - 100.0)
    assert rests[:4] == [15.0, 30.0, 60.0, 120.0]
    assert max(rests) == rests[-1] == 600.0


def test_a_spare_that_rests_is_not_called_unless_somebody_is_lost() -> None:
    spare = _record(1, speed=100.0, state="aside")
    told: list[str] = []
    lead: Any = SimpleNamespace(
        _roster=Roster([_record(0, speed=100.0), spare]),
        _called_at=-100.0,
        _formed=True,
        _rules=Rules(batch=256),
        _speeds=lambda: [100.0],
        _tell=told.append,
        _call_together=lambda: told.append("all"),
    )
    spare.rest(time.monotonic())
    Lead._watch(lead)
    assert (spare.state, told) == ("aside", [])
    Lead._note_fewer(lead)
    Lead._watch(lead)
    assert spare.state == "ready"
    assert told[-1] == "all"
