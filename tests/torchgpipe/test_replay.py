"""The replay against closed forms, and against the rules themselves on generated costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.replay import Costs, replay


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


def test_one_partition_two_chunks_except_last_costs_a_seventh_more() -> None:
    # Backward twice as long as forward: 3 of 3.5 units; published: 0.858 for U-Net, 0.853 for ResNet-101.
    plain = Costs(forward=[[1.0]], backward=[[2.0]], recompute=[[0.0]])
    halves = Costs(forward=table(2, 1, 0.5), backward=table(2, 1, 1.0), recompute=[[0.5], [0.0]])
    assert replay(plain).seconds / replay(halves).seconds == pytest.approx(3 / 3.5)


def test_recomputation_hides_while_the_gradient_is_on_its_way() -> None:
    # Two partitions, one micro-batch, recomputed: partition 0 recomputes while partition 1 does.
    timeline = replay(Costs(forward=[[1.0, 1.0]], backward=[[2.0, 2.0]], recompute=[[1.0, 1.0]]))
    assert timeline.seconds == pytest.approx(2 + 1 + 2 + 2)


@pytest.mark.parametrize(("copy", "loss", "seconds"), [(0.0, 0.0, 6.0), (0.5, 0.0, 7.0), (0.0, 0.25, 6.25)])
def test_copies_and_loss_delay(copy: float, loss: float, seconds: float) -> None:
    costs = Costs(forward=[[1.0, 1.0]], backward=[[2.0, 2.0]], recompute=[[0.0, 0.0]], copy=copy, loss=loss)
    assert replay(costs).seconds == pytest.approx(seconds)


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cell = st.floats(0, 10).map(lambda x: round(x, 3))
    rows = st.lists(st.lists(cell, min_size=n, max_size=n), min_size=m, max_size=m)
    return Costs(draw(rows), draw(rows), draw(rows), copy=draw(cell), loss=draw(cell))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_costs())
def test_the_rules_hold_and_no_task_could_start_earlier(costs: Costs) -> None:
    timeline = replay(costs)
    m, n = len(costs.forward), len(costs.forward[0])
    at = {(e.kind, e.micro_batch, e.partition): e for e in timeline.events}
    last_forward = max(e.end for e in timeline.events if e.kind == "forward" and e.partition == n - 1)
    previous: dict[int, float] = {}
    for e in timeline.events:
        i, j = e.micro_batch, e.partition
        needs = [0.0, previous.get(j, 0.0)]
        if e.kind == "forward" and j > 0:
            needs.append(at["forward", i, j - 1].end + costs.copy)
        if e.kind != "forward":
            needs.append(last_forward + costs.loss)
        if e.kind == "backward" and j < n - 1:
            needs.append(at["backward", i, j + 1].end + costs.copy)
        assert e.start == max(needs)
        previous[j] = e.end
    assert timeline.seconds == max(previous.values())
    for j in range(n):
        order = [e.micro_batch for e in timeline.events if e.partition == j and e.kind == "backward"]
        assert order == list(reversed(range(m)))


def test_imports_no_torch() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.find_spec('torchgpipe'); "
        "path = spec.submodule_search_locations[0] + '/replay.py'; "
        "s = importlib.util.spec_from_file_location('replay', path); m = importlib.util.module_from_spec(s); "
        "sys.modules['replay'] = m; s.loader.exec_module(m); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
