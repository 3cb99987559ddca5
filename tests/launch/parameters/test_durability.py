"""What must be on disk before a node is told something."""

from convoy.launch.parameters.durability import Durability


def test_with_a_journal_an_answer_waits_for_what_it_tells_of() -> None:
    durability = Durability(journal=True, versions=50, version=1, changes=3, written=2)
    assert durability.may_tell(2, change=2, is_over=False)
    assert not durability.may_tell(2, change=3, is_over=False)
    durability.note_written(3, 2, "")
    assert durability.may_tell(2, change=3, is_over=False)


def test_without_one_an_answer_waits_only_where_too_much_could_be_lost() -> None:
    durability = Durability(journal=False, versions=10, version=100, changes=9, written=0)
    assert durability.may_tell(110, change=9, is_over=False)
    assert not durability.may_tell(111, change=9, is_over=False)


def test_nobody_hears_that_it_is_over_before_the_end_is_on_disk() -> None:
    durability = Durability(journal=False, versions=10, version=100, changes=9, written=8)
    assert not durability.may_tell(101, change=9, is_over=True)
    assert durability.is_due(101, is_over=True, is_idle=False)


def test_a_disk_that_does_not_take_it_stops_nobody_and_is_tried_again() -> None:
    durability = Durability(journal=True, versions=10, version=1, changes=4, written=3)
    durability.note_written(4, 2, "no space left")
    assert durability.may_tell(2, change=5, is_over=False)
    assert durability.version == 1
    durability.changes += 1
    assert durability.is_due(2, is_over=False, is_idle=False)


def test_it_is_written_when_half_of_what_may_be_lost_has_come_together() -> None:
    durability = Durability(journal=False, versions=10, version=100, changes=9, written=4)
    due = [durability.is_due(v, is_over=False, is_idle=False) for v in (104, 105)]
    assert due == [False, True]
    assert durability.is_due(101, is_over=False, is_idle=True)
    durability.note_written(9, 105, "")
    assert not durability.is_due(105, is_over=False, is_idle=True)
    always = Durability(journal=False, versions=1, version=1, changes=1)
    assert always.is_due(2, is_over=False, is_idle=False)
