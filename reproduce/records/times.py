"""Raise errors for times that no clock can have measured: zero, negative, infinite, or NaN."""

import math
from collections.abc import Mapping, Sequence

from reproduce.error import Error
from reproduce.records.places import Json

TIMES = (
    "time",
    "step_time",
    "here_time",
    "work_time",
    "wall_time",
    "epoch_time",
    "one_thread_time",
)
"""The names of those samples and values of a row that are times."""


def check_times(row: str, samples: Mapping[str, Sequence[float]], values: Json, where: str) -> None:
    """Raise `Error` if one of the times of a row is not positive and finite.

    Args:
        row: The name of the row.
        samples: The row's lists of samples, by their names, such as `step_time`.
        values: The row's single values, by their names.
        where: The file and the place of the row in it, such as `FILE: results[3]`.
    """
    for name in TIMES:
        for k, seconds in enumerate(samples.get(name, ())):
            check_time(row, seconds, f"{where}.samples.{name}[{k}]")
        value = values.get(name)
        if isinstance(value, (int, float)):
            check_time(row, value, f"{where}.values.{name}")


def check_time(row: str, seconds: float, where: str) -> None:
    """Raise `Error` if `seconds`, a time of the row `row`, is not positive and finite."""
    if not 0 < seconds < math.inf:
        raise Error(
            f"{where}: the time of {row!r} is {seconds:g}, but a time must be above 0 and finite: "
            "measure this row again"
        )
