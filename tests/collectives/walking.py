"""Walks through schedules of all ranks on lists of numbers: what each holds after every round."""

from collections.abc import Sequence

from convoy.collectives.schedule import Schedule

Vectors = list[list[float]]


def walk(schedules: Sequence[Schedule], vectors: Sequence[Sequence[float]]) -> list[Vectors]:
    """Return what all ranks hold after each round; every message must be awaited, and come."""
    now = [list(vector) for vector in vectors]
    history: list[Vectors] = []
    for steps in zip(*schedules, strict=True):
        posted = {
            (rank, send.peer): ((send.start, send.stop), now[rank][send.start : send.stop])
            for rank, step in enumerate(steps)
            for send in step.sends
        }
        then = [list(vector) for vector in now]
        for rank, step in enumerate(steps):
            for receive in step.receives:
                sent, numbers = posted.pop((receive.peer, rank))
                assert sent == (receive.start, receive.stop)
                for place, number in enumerate(numbers, start=receive.start):
                    then[rank][place] = then[rank][place] + number if receive.adds else number
        assert not posted, f"nobody waits for {posted}"
        now = then
        history.append(now)
    return history
