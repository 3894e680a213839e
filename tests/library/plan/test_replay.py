"""The replay against closed forms, and against the rules themselves on generated costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.plan.replay import Costs, Event, Timeline, replay, shared


def table(m: int, n: int, seconds: float) -> list[list[float]]:
    return [[seconds] * n for _ in range(m)]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 32])
def test_equal_partitions_without_checkpointing_speed_up_by_nm_over_n_plus_m_minus_1(n: int, m: int) -> None:
    costs = Costs(forward=table(m, n, 1.0), backward=table(m, n, 2.0), recompute=table(m, n, 0.0))
    timeline = replay(costs)
    assert timeline.seconds == pytest.approx(3 * (m + n - 1))
    assert costs.total / timeline.seconds == pytest.approx(n * m / (n + m - 1))
    assert timeline.bubble == pytest.approx((n - 1) / (n + m - 1))
    assert [timeline.busy(j) for j in range(n)] == [3 * m] * n


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cell = st.floats(0, 10).map(lambda x: round(x, 3))
    rows = st.lists(st.lists(cell, min_size=n, max_size=n), min_size=m, max_size=m)
    copy = draw(st.one_of(cell, st.lists(cell, min_size=n - 1, max_size=n - 1)))
    routes = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = draw(st.dictionaries(st.sampled_from(routes), cell, max_size=4)) if routes else {}
    switches = draw(st.booleans()), draw(st.booleans())
    return Costs(draw(rows), draw(rows), draw(rows), copy, draw(cell), skips, *switches)


def routes_of(costs: Costs) -> list[tuple[int, int, float]]:
    """List all copies of a micro-batch in forward: source, target, seconds; a partition's next one goes first."""
    n = len(costs.forward[0])
    copies = [costs.copy] * (n - 1) if isinstance(costs.copy, float) else costs.copy
    return [*((j, j + 1, x) for j, x in enumerate(copies)), *((a, b, x) for (a, b), x in costs.skips.items())]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_costs())
def test_the_rules_hold_and_no_task_could_start_earlier(costs: Costs) -> None:
    timeline = replay(costs)
    m, n = len(costs.forward), len(costs.forward[0])
    assert len({(e.kind, e.micro_batch, e.partition) for e in timeline.events}) == len(timeline.events)
    assert len(timeline.events) == 2 * m * n + sum(x > 0 for row in costs.recompute for x in row)
    free, there = [0.0] * n, dict.fromkeys(((i, j) for i in range(m) for j in range(n)), 0.0)
    backward = False

    for e in timeline.events:
        i, j = e.micro_batch, e.partition
        if e.kind != "forward" and not backward:  # all begins again, once the loss is there
            backward = True
            begin = (max(free) if costs.blocking else free[-1]) + costs.loss
            free, there = [begin] * n, dict.fromkeys(there, begin)
        early = e.kind == "recompute" and costs.ahead
        assert e.start == (free[j] if early else max(free[j], there[i, j]))
        assert e.end == e.start + getattr(costs, e.kind)[i][j]
        free[j] = e.end
        if e.kind == "recompute":
            continue
        for a, b, seconds in routes_of(costs):
            source, target = (b, a) if backward else (a, b)
            if source != j:
                continue
            arrival = e.end + seconds
            if costs.blocking and seconds:  # both sides are busy until it is done
                arrival = max(free[source], free[target]) + seconds
                free[source] = free[target] = arrival
            there[i, target] = max(there[i, target], arrival)
    assert timeline.seconds == max(free)
    for j in range(n):
        for kind, order in (("forward", range(m)), ("backward", reversed(range(m)))):
            assert [e.micro_batch for e in timeline.events if e.partition == j and e.kind == kind] == list(order)


def test_time_is_stretched_where_several_devices_work() -> None:
    def tasks(*times: tuple[float, float]) -> list[Event]:
        return [Event("forward", 0, j, start, end) for j, (start, end) in enumerate(times)]

    # One works from 0 to 1, two until 2, three until 3, one until 4; then copies.
    given = Timeline(tasks((0, 2), (1, 4), (2, 3), (2, 3)), 5.0, 4)
    assert shared(given, 0.5) == Timeline(tasks((0, 2.5), (1, 5.5), (2.5, 4.5), (2.5, 4.5)), 6.5, 4)


def test_imports_no_torch() -> None:
    source = Path(replay.__code__.co_filename).read_text()
    assert not re.search(r"^(import|from) torch", source, re.MULTILINE)
