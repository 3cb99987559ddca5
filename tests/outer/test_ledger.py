"""The ledger shows every sample of every epoch trained once, and finds where one was not."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.ledger import Update, find_faults, settle


def _shares(count: int, nodes: int) -> tuple[tuple[int, int], ...]:
    edges = [count * j // nodes for j in range(nodes + 1)]
    return tuple((j, stop - start) for j, (start, stop) in enumerate(pairwise(edges)))


def _update(step: int, samples: int, batch: int, *, quorum: int = 1, nodes: int = 3) -> Update:
    per_epoch = -(-samples // batch)
    start = step % per_epoch * batch
    stop = min(start + batch, samples)
    return Update(step, step // per_epoch, start, stop, quorum, _shares(stop - start, nodes))


def _clean(samples: int = 100, batch: int = 32, epochs: int = 2) -> list[Update]:
    return [_update(step, samples, batch) for step in range(epochs * -(-samples // batch))]


def test_a_clean_ledger_has_no_faults() -> None:
    lines = _clean()
    assert [(line.start, line.stop) for line in lines[:4]] == [
        (0, 32),
        (32, 64),
        (64, 96),
        (96, 100),
    ]
    assert settle(lines) == lines
    assert find_faults(lines, 100, 2) == []
    assert find_faults(iter(lines), 100) == []


def test_an_empty_ledger_lacks_its_epochs() -> None:
    assert find_faults([], 100) == []
    assert find_faults([], 100, 2) == ["0 epochs instead of 2"]


@pytest.mark.parametrize("step", range(7))
def test_a_missing_update_is_named(step: int) -> None:
    lines = _clean()
    del lines[step]
    assert f"update {step} is missing: {step + 1} follows" in find_faults(lines, 100, 2)


def test_a_missing_last_update_is_found_where_the_run_is_over() -> None:
    assert find_faults(_clean()[:-1], 100, 2) == ["epoch 1 ends at sample 96 of 100"]


def test_samples_trained_twice_are_found() -> None:
    lines = _clean()
    lines[2] = dataclasses.replace(lines[2], start=60, shares=((0, 36),))
    assert find_faults(lines, 100, 2) == ["epoch 0: update 2 starts at sample 60, not at 64"]


def test_a_stretch_trained_by_two_updates_is_found() -> None:
    again = [dataclasses.replace(line, step=line.step + 1) for line in _clean()[1:]]
    assert find_faults([*_clean()[:2], *again], 100, 2) == [
        "epoch 0: update 2 starts at sample 32, not at 64"
    ]


def test_samples_left_out_are_found() -> None:
    lines = _clean()
    lines[1] = dataclasses.replace(lines[1], start=33, shares=((0, 31),))
    assert find_faults(lines, 100, 2) == ["epoch 0: update 1 starts at sample 33, not at 32"]


@pytest.mark.parametrize("given_", [31, 33, 0])
def test_shares_that_are_not_the_stretch_are_found(given_: int) -> None:
    lines = _clean()
    lines[5] = dataclasses.replace(lines[5], shares=((0, given_),))
    expected = f"update 5 handed out {given_} samples of its stretch"
    assert find_faults(lines, 100, 2) == [expected]


def test_a_step_that_was_done_again_replaces_the_older() -> None:
    lines = _clean()
    again = _update(4, 100, 32, quorum=2, nodes=2)
    written = [*lines[:5], again, *lines[5:]]
    assert settle(written) == [*lines[:4], again, *lines[5:]]
    assert find_faults(written, 100, 2) == []


def test_going_back_to_a_checkpoint_voids_all_that_came_after() -> None:
    lines = _clean()
    again = [_update(step, 100, 32, quorum=2, nodes=2) for step in range(2, 8)]
    assert settle([*lines[:7], *again]) == [*lines[:2], *again]
    assert find_faults([*lines[:7], *again], 100, 2) == []


def test_going_back_and_not_forward_again_leaves_the_run_incomplete() -> None:
    again = _update(1, 100, 32, quorum=2)
    assert settle([*_clean(), again]) == [_clean()[0], again]
    assert find_faults([*_clean(), again], 100) == []
    faults = find_faults([*_clean(), again], 100, 2)
    assert faults == ["epoch 0 ends at sample 64 of 100", "1 epochs instead of 2"]


def test_a_last_epoch_under_way_is_no_fault_until_the_run_is_over() -> None:
    lines = _clean()[:6]
    assert find_faults(lines, 100) == []
    assert find_faults(lines, 100, 2) == ["epoch 1 ends at sample 64 of 100"]


def test_an_earlier_epoch_must_be_complete_even_while_the_last_is_under_way() -> None:
    lines = [*_clean()[:3], Update(3, 1, 0, 32, 1, ((0, 32),))]
    assert find_faults(lines, 100) == ["epoch 0 ends at sample 96 of 100"]


def test_more_epochs_than_asked_for_are_found() -> None:
    assert find_faults(_clean(epochs=3), 100, 2) == ["3 epochs instead of 2"]


def test_an_epoch_that_was_left_out_is_found() -> None:
    lines = _clean()
    skipped = [dataclasses.replace(line, epoch=5) if line.epoch else line for line in lines]
    assert find_faults(skipped, 100, 2) != []


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Update], int, int]:
    """Return a ledger of a run that was lost now and then, its samples and its epochs."""
    batch = draw(st.integers(2, 40))
    samples = batch + draw(st.integers(1, 3 * batch))
    epochs = draw(st.integers(1, 3))
    steps = epochs * -(-samples // batch)
    lines: list[Update] = []
    step, quorum = 0, 1
    for kept in draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=5)):
        forward, back = kept
        nodes = draw(st.integers(1, 5))
        reached = min(step + forward, steps)
        lines += [
            _update(s, samples, batch, quorum=quorum, nodes=nodes) for s in range(step, reached)
        ]
        step, quorum = max(0, reached - back), quorum + 1
    lines += [_update(s, samples, batch, quorum=quorum) for s in range(step, steps)]
    return lines, samples, epochs


@given(history=histories())
def test_a_run_that_was_lost_now_and_then_has_no_faults(
    history: tuple[list[Update], int, int],
) -> None:
    lines, samples, epochs = history
    assert find_faults(lines, samples, epochs) == []
    valid = settle(lines)
    assert [line.step for line in valid] == list(range(len(valid)))
    newest = {line.step: line for line in lines}
    assert valid == [newest[step] for step in range(len(valid))]
    for cut in range(len(lines)):
        assert find_faults(lines[:cut], samples) == []


def _changed(update: Update, kind: str) -> Update:
    (node, first), *others = update.shares
    more, fewer = ((node, first + 1), *others), ((node, first - 1), *others)
    changes = {
        "a sample twice": {"stop": update.stop + 1, "shares": more},
        "a sample left out": {"start": update.start + 1, "shares": fewer},
        "a sample too early": {"start": update.start - 1, "shares": more},
        "shares too large": {"shares": more},
        "shares too small": {"shares": fewer},
        "a node forgotten": {"shares": ()},
        "another epoch": {"epoch": update.epoch + 1},
        "another step": {"step": update.step + 1},
    }
    return dataclasses.replace(update, **changes[kind])  # type: ignore[arg-type]


@given(
    history=histories(),
    place=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(
        [
            "a sample twice",
            "a sample left out",
            "a sample too early",
            "shares too large",
            "shares too small",
            "a node forgotten",
            "another epoch",
            "another step",
            "line lost",
        ]
    ),
)
def test_one_wrong_line_is_found(
    history: tuple[list[Update], int, int], place: float, kind: str
) -> None:
    lines, samples, epochs = history
    valid = settle(lines)
    number = int(place * len(valid))
    wrong = [] if kind == "line lost" else [_changed(valid[number], kind)]
    assert find_faults([*valid[:number], *wrong, *valid[number + 1 :]], samples, epochs) != []
