"""Test `replay`, which computes when each task starts from the seconds of all tasks and copies.

The tests check the rules that `replay` must follow, and seconds that it predicts for a CPU and for
GPUs.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.replay import Costs, Event, Timeline, replay, shared
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.tensors.observe import Kind, Task


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    m = draw(st.integers(1, 6))
    n = draw(st.integers(1, 5))
    seconds = st.floats(0, 10).map(lambda x: round(x, 3))
    of_partitions = st.lists(seconds, min_size=n, max_size=n)
    of_tasks = st.lists(of_partitions, min_size=m, max_size=m)
    of_boundaries = st.lists(seconds, min_size=n - 1, max_size=n - 1)
    copy = draw(st.one_of(seconds, of_boundaries))
    skips = {}
    routes = list(combinations(range(n), 2))
    if routes:
        skips = draw(st.dictionaries(st.sampled_from(routes), seconds, max_size=4))
    blocking = draw(st.booleans())
    ahead = draw(st.booleans())
    forward, backward, recompute = draw(of_tasks), draw(of_tasks), draw(of_tasks)
    loss = draw(seconds)
    return Costs(forward, backward, recompute, copy, loss, skips, blocking, ahead)


def routes_of(costs: Costs) -> list[tuple[int, int, float]]:
    """Return the copies that one micro-batch needs in forward, as (source, target, seconds).

    Source and target are partitions. Copies to the next partition come first, then copies of skips.
    """
    n = len(costs.forward[0])
    copies = [costs.copy] * (n - 1) if isinstance(costs.copy, float) else costs.copy
    routes = [(j, j + 1, seconds) for j, seconds in enumerate(copies)]
    for (source, target), seconds in costs.skips.items():
        routes.append((source, target, seconds))
    return routes


def assert_each_task_is_there_once(costs: Costs, events: Sequence[Event]) -> None:
    m, n = len(costs.forward), len(costs.forward[0])
    order = defaultdict(list)
    for e in events:
        order[e.kind, e.partition].append(e.micro_batch)
    for j in range(n):
        assert order["forward", j] == list(range(m))
        assert order["backward", j] == list(reversed(range(m)))
        recomputed = [i for i in range(m) if costs.recompute[i][j] > 0]
        assert sorted(order["recompute", j]) == recomputed


class Progress:
    """The times at which devices become free and inputs of tasks arrive, so far in a step.

    A test goes through the tasks of a simulated step, and updates these times. It checks that no
    task could have started earlier.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.routes = routes_of(costs)
        self.free = [0.0] * len(costs.forward[0])
        self.there: dict[tuple[int, int], float] = defaultdict(float)
        """Maps a micro-batch and a partition to the time at which the task's inputs arrive."""
        self.backward = False

    def begin_backward(self) -> None:
        """Begin the backward, for which each device is free as soon as the loss is computed."""
        self.backward = True
        forward_ends = max(self.free) if self.costs.blocking else self.free[-1]
        begin = forward_ends + (self.costs.loss or 0.0)
        self.free = [begin] * len(self.free)
        self.there = defaultdict(lambda: begin)

    def copy(self, e: Event) -> None:
        """Let the outputs of the task `e` arrive at the partitions that need them.

        If copies block, each copy also keeps both of its devices busy.
        """
        for a, b, seconds in self.routes:
            source, target = (b, a) if self.backward else (a, b)
            if source != e.partition:
                continue
            arrival = e.end + seconds
            if self.costs.blocking and seconds:  # the copy occupies both devices
                arrival = max(self.free[source], self.free[target]) + seconds
                self.free[source] = self.free[target] = arrival
            task = e.micro_batch, target
            self.there[task] = max(self.there[task], arrival)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_costs())
def test_the_rules_hold_and_no_task_could_start_earlier(costs: Costs) -> None:
    timeline = replay(costs)

    assert_each_task_is_there_once(costs, timeline.events)
    progress = Progress(costs)
    for e in timeline.events:
        i, j = e.micro_batch, e.partition
        if e.kind != "forward" and not progress.backward:
            progress.begin_backward()
        earliest = progress.free[j]
        if e.kind != "recompute" or not costs.ahead:
            earliest = max(earliest, progress.there[i, j])
        assert e.start == earliest
        seconds = getattr(costs, e.kind)[i][j]
        assert e.end == e.start + seconds
        progress.free[j] = e.end
        if e.kind != "recompute":
            progress.copy(e)
    assert timeline.seconds == max(progress.free)


def of_tasks(forward: float, backward: float, n: int, m: int) -> dict[Kind, list[list[float]]]:
    """Return three tables of seconds: of the forwards, the recomputations and the backwards.

    A table has a row for each of `m` micro-batches, and a column for each of `n` partitions. All
    forwards take `forward` seconds, all backwards `backward` seconds, and recomputations 0 seconds.
    """
    seconds: dict[Kind, float] = {"forward": forward, "recompute": 0.0, "backward": backward}
    return {kind: [[each] * n] * m for kind, each in seconds.items()}


def costs_of(forward: float, backward: float, n: int, m: int) -> Costs:
    tables = of_tasks(forward, backward, n, m)
    return Costs(tables["forward"], tables["backward"], tables["recompute"])


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {f"{e.kind} {e.micro_batch} {e.partition}": (e.start, e.end) for e in timeline.events}


def test_one_thread_issues_the_tasks_of_all_devices() -> None:
    """Check the times of a step in which one thread issues (submits) all devices' tasks.

    A device needs at least as long for a task as the thread needs to issue the task.

    - A forward takes 1 s on the device, but the thread needs 1.5 s to issue it.
    - A backward takes 2 s on the device, and the thread needs 0.5 s to issue it.
    """
    costs = replace(costs_of(1.0, 2.0, 2, 2), issue=of_tasks(1.5, 0.5, 2, 2))

    timeline = replay(costs)

    assert spans(timeline) == {
        "forward 0 0": (0.0, 1.5),
        "forward 0 1": (1.5, 3.0),
        "forward 1 0": (3.0, 4.5),  # the device was free at 1.5
        "forward 1 1": (4.5, 6.0),
        "backward 1 1": (6.0, 8.0),
        "backward 1 0": (8.0, 10.0),  # issued until 7.0, but its gradient is there at 8.0
        "backward 0 1": (8.0, 10.0),
        "backward 0 0": (10.0, 12.0),
    }
    assert timeline.seconds == 12.0
    assert replay(replace(costs, issue=None)).seconds == 9.0


def test_the_thread_issues_tasks_in_the_order_of_clock_cycles() -> None:
    """Check that a task of micro-batch 1 can be issued before the last task of micro-batch 0.

    To issue a task is to submit it to its device.
    """
    costs = replace(costs_of(1.0, 1.0, 3, 2), issue=of_tasks(1.0, 0.0, 3, 2))
    found = spans(replay(costs))
    assert found["forward 1 0"] == (2.0, 3.0)
    assert found["forward 0 2"] == (3.0, 4.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_costs())
def test_a_fast_thread_delays_nothing(costs: Costs) -> None:
    # The order in which tasks are issued also decides which of two blocking copies comes first.
    costs = replace(costs, blocking=False)
    m, n = len(costs.forward), len(costs.forward[0])
    with_thread = replay(replace(costs, issue=of_tasks(0.0, 0.0, n, m)))
    without = replay(costs)
    assert with_thread.seconds == without.seconds
    assert sorted(with_thread.events) == sorted(without.events)


def test_time_is_stretched_where_several_devices_work() -> None:
    def tasks(*times: tuple[float, float]) -> list[Event]:
        return [Event("forward", 0, j, start, end) for j, (start, end) in enumerate(times)]

    # One device works from 0 to 1, two work until 2, three until 3, one until 4. Then copies run.
    given = Timeline(tasks((0, 2), (1, 4), (2, 3), (2, 3)), 5.0, 4)
    assert shared(given, 0.5) == Timeline(tasks((0, 2.5), (1, 5.5), (2.5, 4.5), (2.5, 4.5)), 6.5, 4)


GPU = replace(load_hardware("p40x8"), link_latency=0.0)
CPU = replace(GPU, launch_overlaps=False)
X = torch.ones(8, 256)


def model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers)


PARAMETER_BYTES = sum(p.nbytes for p in model().parameters())
ONCE = PARAMETER_BYTES / GPU.memory_bandwidth / GPU.memory_efficiency["elementwise"]
"""The seconds in which a GPU reads or writes all parameters."""


def of_partition(j: int, tasks: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return [task for task in tasks if task[2] == j]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("balance", [(4,), (2, 2), (1, 1, 2)])
def test_tasks_come_in_the_order_in_which_a_cpu_runs_them(
    balance: tuple[int, ...], chunks: int
) -> None:
    """Check that the predicted order of tasks is that of a real run on the CPU.

    If one thread runs all tasks, each recomputation comes right before its backward. If each device
    has a thread, a recomputation can come earlier.
    """
    n = len(balance)
    ran: list[tuple[str, int, int]] = []

    def note(task: Task) -> AbstractContextManager[None]:
        if task.kind != "forward":
            ran.append((task.kind, task.micro_batch, task.partition))
        return nullcontext()

    devices = ["cpu"] * n
    gpipe = GPipe(model(), list(balance), devices=devices, chunks=chunks, checkpoint="always")
    gpipe.observer = note
    gpipe(X).sum().backward()

    setup = Setup(len(X), balance, chunks, "always")
    predictor = Predictor(count(model(), X), CPU)
    step = predictor.step(setup)
    events = sorted(step.events, key=lambda event: event.start)
    predicted = [event[:3] for event in events if event.kind != "forward"]
    overlap = chunks > 1 and n > 1
    work = sum(event.end - event.start for event in events)
    assert (step.window[1] < 0.9 * work) == overlap
    if not overlap:
        assert predicted == ran
    for j in range(n):
        assert of_partition(j, predicted) == of_partition(j, ran)
    assert predictor.costs(setup).ahead == overlap
    on_gpu = Predictor(predictor.counts, GPU)
    assert on_gpu.costs(setup).ahead


@pytest.mark.parametrize(
    ("node", "balance", "name", "zeroed", "times"),
    [
        # The update reads parameters and gradients, and writes parameters.
        (GPU, (4,), "sgd", False, 3),
        # Setting gradients to zero writes another tensor.
        (GPU, (4,), "sgd", True, 3 + 1),
        (GPU, (4,), "none", False, 0),
        (GPU, (4,), "adam", False, 3 + 4),
        (GPU, (2, 2), "adam", False, (3 + 4) / 2),
        (CPU, (2, 2), "adam", False, 3 + 4),  # one thread updates all partitions
    ],
)
def test_seconds_of_an_update(
    node: Hardware, balance: tuple[int, ...], name: str, zeroed: bool, times: float
) -> None:
    optimizer = optimizer_named(name, foreach=False)
    setup = Setup(len(X), balance, 1, "never", optimizer, zeroed=zeroed)
    predictor = Predictor(count(model(), X), replace(node, launch=0.0))
    step = predictor.step(setup)
    update = step.seconds - step.window[1]
    assert update == pytest.approx(times * ONCE)


def test_gradients_that_stay_are_added_to_by_every_micro_batch() -> None:
    """Check that a step takes longer if gradients exist at its beginning.

    The first micro-batch must then add to them, too. The addition reads two tensors and writes one.
    """
    predictor = Predictor(count(model(), X), replace(GPU, launch=0.0))
    optimizer = optimizer_named("sgd", foreach=False)
    dropped = Setup(len(X), (4,), 2, "never", optimizer)
    zeroed = replace(dropped, zeroed=True)
    _, dropped_seconds = predictor.step(dropped).window
    _, zeroed_seconds = predictor.step(zeroed).window
    assert zeroed_seconds - dropped_seconds == pytest.approx(3 * ONCE)
