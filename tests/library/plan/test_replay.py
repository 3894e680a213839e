"""The replay follows its rules; predictions depend on the kind of hardware."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.replay import Costs, Event, Timeline, replay, shared
from torchgpipe.tensors.observe import Task


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
    """List the forward copies of a micro-batch: source, target, seconds. Copies to the next partition come first."""
    n = len(costs.forward[0])
    copies = [costs.copy] * (n - 1) if isinstance(costs.copy, float) else costs.copy
    return [
        *((j, j + 1, x) for j, x in enumerate(copies)),
        *((a, b, x) for (a, b), x in costs.skips.items()),
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_costs())
def test_the_rules_hold_and_no_task_could_start_earlier(costs: Costs) -> None:
    timeline = replay(costs)
    m, n = len(costs.forward), len(costs.forward[0])
    assert len({(e.kind, e.micro_batch, e.partition) for e in timeline.events}) == len(
        timeline.events
    )
    assert len(timeline.events) == 2 * m * n + sum(x > 0 for row in costs.recompute for x in row)
    free, there = [0.0] * n, dict.fromkeys(((i, j) for i in range(m) for j in range(n)), 0.0)
    backward = False

    for e in timeline.events:
        i, j = e.micro_batch, e.partition
        if (
            e.kind != "forward" and not backward
        ):  # all devices start again when the loss is computed
            backward = True
            begin = (max(free) if costs.blocking else free[-1]) + (costs.loss or 0.0)
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
            if costs.blocking and seconds:  # both devices are busy until the copy is done
                arrival = max(free[source], free[target]) + seconds
                free[source] = free[target] = arrival
            there[i, target] = max(there[i, target], arrival)
    assert timeline.seconds == max(free)
    for j in range(n):
        for kind, order in (("forward", range(m)), ("backward", reversed(range(m)))):
            assert [
                e.micro_batch for e in timeline.events if e.partition == j and e.kind == kind
            ] == list(order)


def test_time_is_stretched_where_several_devices_work() -> None:
    def tasks(*times: tuple[float, float]) -> list[Event]:
        return [Event("forward", 0, j, start, end) for j, (start, end) in enumerate(times)]

    # Devices at work: one from 0 to 1, two until 2, three until 3, one until 4; then copies.
    given = Timeline(tasks((0, 2), (1, 4), (2, 3), (2, 3)), 5.0, 4)
    assert shared(given, 0.5) == Timeline(tasks((0, 2.5), (1, 5.5), (2.5, 4.5), (2.5, 4.5)), 6.5, 4)


GPU = replace(load_hardware("p40x8"), link_latency=0.0)
CPU = replace(GPU, launch_overlaps=False)
X = torch.ones(8, 256)


def model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.Tanh())))


ONCE = (
    sum(p.nbytes for p in model().parameters())
    / GPU.memory_bandwidth
    / GPU.memory_efficiency["elementwise"]
)
"""The seconds in which a GPU reads or writes all parameters."""


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("balance", [(4,), (2, 2), (1, 1, 2)])
def test_tasks_come_in_the_order_in_which_a_cpu_runs_them(
    balance: tuple[int, ...], chunks: int
) -> None:
    """In one thread, recomputation comes right before its backward; with several threads, it may come earlier."""
    ran: list[Task] = []
    gpipe = GPipe(
        model(), list(balance), devices=["cpu"] * len(balance), chunks=chunks, checkpoint="always"
    )
    gpipe.observer = lambda task: nullcontext(ran.append(task))  # type: ignore[func-returns-value]
    gpipe(X).sum().backward()
    kinds = [
        (task.kind, task.micro_batch, task.partition) for task in ran if task.kind != "forward"
    ]

    setup = Setup(len(X), balance, chunks, "always")
    predictor = Predictor(count(model(), X), CPU)
    events = sorted(predictor.step(setup).events, key=lambda event: event.start)
    predicted = [event[:3] for event in events if event.kind != "forward"]
    costs = predictor.costs(setup)
    overlap = chunks > 1 and len(balance) > 1
    assert (predictor.step(setup).window[1] < 0.9 * sum(x.end - x.start for x in events)) == overlap
    assert overlap or predicted == kinds
    for j in range(len(balance)):
        assert [x for x in predicted if x[2] == j] == [x for x in kinds if x[2] == j]
    on_gpu = Predictor(predictor.counts, GPU).costs(setup)
    assert (costs.ahead, on_gpu.ahead) == (overlap, True)


@pytest.mark.parametrize(
    ("node", "balance", "name", "zeroed", "times"),
    [
        (GPU, (4,), "sgd", False, 3),  # parameters and gradients are read, parameters are written
        (GPU, (4,), "sgd", True, 3 + 1),  # setting to zero only writes
        (GPU, (4,), "none", False, 0),
        (GPU, (4,), "adam", False, 3 + 4),
        (GPU, (2, 2), "adam", False, (3 + 4) / 2),
        (CPU, (2, 2), "adam", False, 3 + 4),  # one thread updates the parameters of all partitions
    ],
)
def test_seconds_of_an_update(
    node: Hardware, balance: tuple[int, ...], name: str, zeroed: bool, times: float
) -> None:
    setup = Setup(len(X), balance, 1, "never", optimizer_named(name, foreach=False), zeroed=zeroed)
    step = Predictor(count(model(), X), replace(node, launch=0.0)).step(setup)
    assert step.seconds - step.window[1] == pytest.approx(times * ONCE)


def test_gradients_that_stay_are_added_to_by_every_micro_batch() -> None:
    """Adding reads two tensors and writes one."""
    counts, node = count(model(), X), replace(GPU, launch=0.0)
    plain = Setup(len(X), (4,), 2, "never", optimizer_named("sgd", foreach=False))
    dropped, zeroed = (
        Predictor(counts, node).step(setup) for setup in (plain, replace(plain, zeroed=True))
    )
    assert zeroed.window[1] - dropped.window[1] == pytest.approx(3 * ONCE)
