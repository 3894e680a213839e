"""Clock cycles, against their definition: cycle k holds the tasks (i, j) with i + j = k."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.schedule import clock_cycles, overlaps

COUNT = st.integers(1, 12)

# m, n, cycles as drawn in the paper.
DRAWN = {
    "one task": (1, 1, [[(0, 0)]]),
    "one partition": (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
    "one micro-batch": (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
    "square": (2, 2, [[(0, 0)], [(1, 0), (0, 1)], [(1, 1)]]),
    "more partitions": (2, 3, [[(0, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]),
    "more micro-batches": (3, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]),
}


@pytest.mark.parametrize(("m", "n", "cycles"), DRAWN.values(), ids=DRAWN.keys())
def test_drawn(m: int, n: int, cycles: list[list[tuple[int, int]]]) -> None:
    assert list(clock_cycles(m, n)) == cycles


@settings(deadline=None)
@given(m=COUNT, n=COUNT)
def test_definition(m: int, n: int) -> None:
    tasks = [(i, j) for j in range(n) for i in range(m)]
    expected = [[task for task in tasks if sum(task) == k] for k in range(m + n - 1)]

    assert list(clock_cycles(m, n)) == expected


@settings(deadline=None)
@given(m=COUNT, n=COUNT)
def test_tasks_overlap_where_a_cycle_has_several(m: int, n: int) -> None:
    assert overlaps(m, n) == any(len(cycle) > 1 for cycle in clock_cycles(m, n))


@settings(deadline=None)
@given(m=COUNT, n=COUNT)
def test_every_task_follows_those_that_it_needs(m: int, n: int) -> None:
    cycle_of = {task: k for k, cycle in enumerate(clock_cycles(m, n)) for task in cycle}

    assert len(cycle_of) == m * n
    for (i, j), k in cycle_of.items():
        assert i == 0 or cycle_of[i - 1, j] < k
        assert j == 0 or cycle_of[i, j - 1] < k
