"""Times for people: three digits that count, and round moments for an axis."""

import math


def show_time(seconds: float) -> str:
    """Show a time with three digits that count.

    >>> show_time(0.01234), show_time(0.015), show_time(0.00001), show_time(0.0)
    ('12.3 ms', '15.0 ms', '10.0 us', '0')
    """
    if seconds == 0:
        return "0"
    unit, size = unit_of(seconds)
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and how many seconds that is.

    >>> unit_of(0.25)
    ('ms', 0.001)
    """
    units = (("s", 1.0), ("ms", 1e-3))
    return next((unit for unit in units if seconds >= unit[1]), ("us", 1e-6))


def ticks(end_s: float, at_most: int = 12) -> list[float]:
    """Return round moments from 0 to an end, not many more than asked for.

    >>> ticks(5.0, 6)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if end_s <= 0:
        return [0.0]
    rough = end_s / at_most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= rough), size * 10)
    return [number * step for number in range(math.floor(end_s / step + 1e-9) + 1)]
