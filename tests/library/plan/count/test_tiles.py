"""Products in whole tiles, on whole rounds of processors, against cases worked out by hand."""

from __future__ import annotations

import pytest

from torchgpipe.plan.hardware.tiles import Grid, excess


@pytest.mark.parametrize(
    ("grid", "processors", "times"),
    [
        (Grid(128, 128), 1, 1),
        (Grid(128, 128 * 30), 30, 1),
        (Grid(64, 128 * 30), 30, 1),  # in tiles of 64 x 128
        (Grid(128, 128), 4, 1),  # in four tiles of 32 x 128
        (Grid(32, 128), 30, 30),  # one processor works, the others wait
        (Grid(32, 128, divisible=True), 30, 1),
        (Grid(32, 128, 30), 30, 1),
        (Grid(3, 128 * 30), 30, 32 / 3),  # 29 of 32 rows stick out
        (Grid(128, 32 * 31), 30, 60 / 31),  # 31 of the smallest tiles: a second round for one
    ],
)
def test_excess(grid: Grid, processors: int, times: float) -> None:
    assert excess(grid, processors) == pytest.approx(times)


@pytest.mark.parametrize("rows", [1, 31, 64, 100, 1000])
@pytest.mark.parametrize("processors", [1, 28, 132])
def test_is_never_below_one_and_less_where_tiles_are_shared(rows: int, processors: int) -> None:
    assert 1 <= excess(Grid(rows, 50, divisible=True), processors) <= excess(Grid(rows, 50), processors)
