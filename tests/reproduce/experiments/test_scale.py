"""Scales: the largest that fits is chosen, and one that does not fit is refused with what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_scale
from reproduce.experiments.row import GiB

ALL = list(EXPERIMENTS.values())


@dataclass
class Fake:
    """Stand in for devices."""

    kind: str
    memory: int | None
    count: int = 2

    def __str__(self) -> str:
        return f"{self.count} fake devices"


@pytest.mark.parametrize(
    ("devices", "asked", "expected"),
    [
        (Fake("cuda", 24 * GiB), None, "paper"),
        (Fake("cuda", 24 * GiB, count=1), "small", "small"),
        (Fake("cuda", 8 * GiB), None, "small"),
        (Fake("cpu", 64 * GiB), None, "small"),
        (Fake("cpu", None), None, "small"),
    ],
)
def test_the_largest_scale_that_fits_is_chosen(devices: Any, asked: str | None, expected: str) -> None:
    assert choose_scale(ALL, devices, asked) == expected


@pytest.mark.parametrize(
    ("devices", "asked", "message"),
    [
        (Fake("cuda", 8 * GiB), "paper",
         "--scale paper: it needs 22 GiB of memory each, and 2 fake devices have 8.0 GiB; use --scale small"),
        (Fake("cpu", 64 * GiB), "paper",
         "--scale paper: it needs CUDA devices with 22 GiB of memory each, and this run is on 2 fake devices; "
         "use --scale small"),
        (Fake("cpu", GiB // 2), None,
         "--scale small: it needs 4 GiB of memory in all, and 2 fake devices have 0.5 GiB"),
        (Fake("cpu", 64 * GiB), "huge", "--scale huge: no such scale of amoebanet-speed; there are paper, small"),
    ],
)  # fmt: skip
def test_one_that_does_not_fit_is_refused(devices: Any, asked: str | None, message: str) -> None:
    with pytest.raises(Error) as caught:
        choose_scale(ALL, devices, asked)
    assert str(caught.value) == message
