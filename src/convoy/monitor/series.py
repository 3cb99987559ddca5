"""Numbers over time, in bounded memory: however long a run, a curve has so many points at most."""

from collections.abc import Mapping, Sequence

Cell = float | int | None

POINTS_AT_MOST = 2000


class Series:
    """Columns of equal length; when they are full, every second row goes.

    Rows that are kept are true measurements, never means: whoever compares a curve with
    `events.jsonl` finds each point there.

    Attributes:
        generation: changes whenever rows or columns that were there before have changed. As long
            as it stays, rows were only added at the end.
    """

    def __init__(self, columns: Sequence[str], limit: int = POINTS_AT_MOST) -> None:
        self.columns: dict[str, list[Cell]] = {name: [] for name in columns}
        self.generation = 0
        self._limit = limit
        self._stride = 1  # of the rows that come, every so many-th is kept
        self._offered = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def append(self, row: Mapping[str, Cell]) -> None:
        """Offer a row; a column that it does not name gets None, a new one begins with None."""
        is_kept = self._offered % self._stride == 0
        self._offered += 1
        if not is_kept:
            return
        for name in row.keys() - self.columns.keys():
            self.columns[name] = [None] * len(self)
            self.generation += 1
        for name, cells in self.columns.items():
            cells.append(row.get(name))
        if len(self) >= self._limit:
            self._thin_out()

    def tail(self, start: int) -> dict[str, list[Cell]]:
        """Return the rows from a place on."""
        return {name: cells[start:] for name, cells in self.columns.items()}

    def _thin_out(self) -> None:
        for name, cells in self.columns.items():
            self.columns[name] = cells[::2]
        self._stride *= 2
        self.generation += 1
