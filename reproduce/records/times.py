"""Refuse times that cannot have been measured: 0, less than 0, infinite, or not a number."""

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
    """Raise `Error` if a time of a row is not a positive number.

    Args:
        row: The name of the row.
        samples: The row's samples, such as `step_time`: a list for each name.
        values: The row's values, by name.
        where: The place of the row, such as `FILE: results[3]`.
    """
    for name in TIMES:
        for k, seconds in enumerate(samples.get(name, ())):
            check_time(row, seconds, f"{where}.samples.{name}[{k}]")
        value = values.get(name)
        if isinstance(value, (int, float)):
            check_time(row, value, f"{where}.values.{name}")


def check_time(row: str, seconds: float, where: str) -> None:
    """Raise `Error` if a time of a row is not a positive number."""
    if not 0 < seconds < math.inf:
        raise Error(
            f"{where}: the time of {row!r} is {seconds:g}, and a time is above 0: measure it again"
        )
