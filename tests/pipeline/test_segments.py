"""When a pipeline is empty, and which steps are pipelined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import ConfigError
from convoy.pipeline.segments import Switch, has_stalled, parse_switch, segment_steps

_NEVER = Switch(10**9)


# ---------------------------------------------------------------- segments


@pytest.mark.parametrize(
    ("step", "update", "every", "switch", "expected"),
    [
        (0, 0, 0, _NEVER, 100),  # an epoch
        (90, 190, 0, _NEVER, 10),  # what is left of it
        (0, 0, 30, _NEVER, 30),  # up to a checkpoint
        (30, 30, 30, _NEVER, 30),  # from one to the next
        (90, 90, 30, _NEVER, 10),  # the epoch ends first
        (0, 100, 30, _NEVER, 20),  # checkpoints are counted over the run
        (0, 0, 0, Switch(7), 7),  # up to the switch
        (7, 7, 0, Switch(7), 93),  # which is no end for what comes after it
        (0, 0, 0, Switch(0), 100),
        (90, 190, 50, Switch(195), 5),
        (0, 0, 0, Switch(None), 100),  # nobody knows when that will be
        (99, 99, 1, Switch(100), 1),
    ],
)
def test_a_segment_ends_where_the_whole_network_is_wanted(
    step: int, update: int, every: int, switch: Switch, expected: int
) -> None:
    assert segment_steps(step, update, 100, every, switch) == expected


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 50), st.none() | st.integers(0, 200))
def test_segments_add_up_and_jump_over_no_checkpoint_and_no_switch(
    steps: int, epochs: int, every: int, at: int | None
) -> None:
    switch, update, segments = Switch(at), 0, 0
    for epoch in range(epochs):
        step = 0
        while step < steps:
            count = segment_steps(step, update, steps, every, switch)
            assert count >= 1
            inside = range(update + 1, update + count)  # where the pipeline is not empty
            assert at not in inside
            assert not every or all(number % every for number in inside)
            alike = {switch.is_pipelined(number, []) for number in range(update, update + count)}
            assert len(alike) == 1
            step, update, segments = step + count, update + count, segments + 1
        assert (step, update) == (steps, (epoch + 1) * steps)
    # None of them is shorter than it need be.
    total = epochs * steps
    wanted = {number for number in range(1, total + 1) if number % steps == 0}
    wanted |= {number for number in range(1, total + 1) if every and number % every == 0}
    wanted |= {at} if at is not None and 0 < at < total else set()
    assert segments == len(wanted)


# ---------------------------------------------------------------- the switch


@pytest.mark.parametrize(
    ("text", "pipelined"),
    [
        *(("all", 1000), ("0", 0), ("0.0", 0), ("0.5", 500), ("0.0004", 0), ("0.0006", 1)),
        *(("0.999", 999), ("1", 1), ("20", 20), ("1e2", 100), ("1000", 1000), ("20000", 1000)),
    ],
)
@pytest.mark.parametrize("plain_first", [False, True])
def test_so_many_steps_are_pipelined_whichever_come_first(
    text: str, pipelined: int, plain_first: bool
) -> None:
    switch = parse_switch(text, 1000, plain_first=plain_first)
    how = [switch.is_pipelined(update, []) for update in range(1000)]
    assert sum(how) == pipelined
    assert how == sorted(how, reverse=not plain_first)


@pytest.mark.parametrize("text", ["-1", "-0.5", "nan", "half", "", "50%", "Plateau", "1,5", "none"])
def test_what_is_no_part_and_no_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_switch(text, 1000, plain_first=False)
    assert str(caught.value) == (
        f"'pipelined' cannot be understood; got {text!r}; "
        "allowed: all, plateau, a part below 1 or a number of steps"
    )
    assert caught.value.exit_code == 2


@given(st.floats(0, 0.9999), st.integers(1, 10**6))
def test_a_part_of_a_run_is_never_more_than_the_run(part: float, steps: int) -> None:
    first = parse_switch(repr(part), steps, plain_first=False)
    second = parse_switch(repr(part), steps, plain_first=True)
    assert first.at is not None
    assert second.at is not None
    assert 0 <= first.at <= steps
    assert first.at + second.at == steps
    assert first.at == pytest.approx(part * steps, abs=0.5)


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_plateau_is_a_switch_that_waits_for_the_test_accuracy(plain_first: bool) -> None:
    switch = parse_switch("plateau", 1000, plain_first=plain_first)
    assert switch == Switch(None, plain_first)
    rising, over = [0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5]
    assert switch.is_pipelined(999, []) is not plain_first
    assert switch.is_pipelined(999, rising) is not plain_first
    assert switch.is_pipelined(0, over) is plain_first
    # There is no way back, even where it rises again.
    assert switch.is_pipelined(0, [*over, 0.6, 0.7]) is plain_first


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.5, 0.5], False),
        ([0.5, 0.5, 0.5, 0.5], True),
        ([0.5, 0.4, 0.3, 0.2], True),
        ([0.5, 0.4, 0.4, 0.6], False),
        ([0.5, 0.5009, 0.5009, 0.5009], True),  # less than a thousandth is chance
        ([0.5, 0.5004, 0.5008, 0.5012], False),  # but small gains add up
        ([0.0, 0.0, 0.0], True),  # as if it had been nothing before
        ([0.5, 0.5, 0.5, 0.6, 0.6, 0.6], False),
        ([0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.6], True),
        ([0.5, 0.5, 0.5, 0.5, 0.9], True),
    ],
)
def test_three_epochs_without_a_gain_are_a_plateau(accuracies: list[float], expected: bool) -> None:
    assert has_stalled(accuracies) is expected


@given(st.lists(st.floats(0, 1), max_size=12), st.lists(st.floats(0, 1), max_size=4))
def test_what_has_stalled_stays_so(before: list[float], after: list[float]) -> None:
    assert not has_stalled(before) or has_stalled([*before, *after])
