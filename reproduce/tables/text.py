"""Write numbers as all tables and pages do."""

from __future__ import annotations

from collections.abc import Callable

from reproduce.numbers.metrics import BYTES, Reading

MiB, GiB = BYTES["MiB"], BYTES["GiB"]


def number(value: float | Reading) -> str:
    """Write a number or a middle with three digits, or all before the point: 0.00420, 0.850, 12.0, 132, 4,224."""
    value = value.middle if isinstance(value, Reading) else value
    if 999.5 <= abs(value) < 1e13:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e13:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.2e}" if value else "0"


def ratio(value: float | Reading) -> str:
    """Write a ratio as a number, but with no more than two decimals from 0.1 on: 0.85 stands in a column with 1.25."""
    value = value.middle if isinstance(value, Reading) else value
    return f"{value:.2f}" if 0.1 <= abs(value) < 1 else number(value)


def reading_text(reading: Reading) -> str:
    """Write a reading's middle, bytes as MiB or GiB."""
    if reading.unit not in BYTES:
        return number(reading)
    value = reading.middle * BYTES[reading.unit]
    return f"{value / GiB:.2f} GiB" if value >= GiB else f"{value / MiB:.4g} MiB"


def with_quartiles(reading: Reading, write: Callable[[float], str] = number) -> str:
    """Write a reading's middle and its quartiles, where it has any, as in `12.0 (11.8-12.3)`."""
    between = "" if reading.quartiles is None else f" ({'-'.join(map(write, reading.quartiles))})"
    return write(reading.middle) + between
