"""Clock cycles, against their definition: cycle k holds the tasks (i, j) with i + j = k."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.engine.schedule import clock_cycles, overlaps


def test_drawn() -> None:
    assert list(clock_cycles(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]


@given(m=st.integers(1, 12), n=st.integers(1, 12))
def test_definition(m: int, n: int) -> None:
    tasks = [(i, j) for j in range(n) for i in range(m)]
    cycles = [[task for task in tasks if sum(task) == k] for k in range(m + n - 1)]
    assert list(clock_cycles(m, n)) == cycles
    assert overlaps(m, n) == any(len(cycle) > 1 for cycle in cycles)
