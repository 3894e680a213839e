"""Test on simulated devices that each task starts at the time that `replay` predicts.

If each task starts at this time, no stream waits longer than necessary. The tests also check which
work is submitted to the streams, and in which order.

- The engines, their waits, their copies and their connections are real.
- The streams and NCCL are simulated (simulated.py). A layer occupies the compute stream of its
  partition for the given seconds, and the host needs no time to submit work.

Only tests on GPUs can show how real streams behave, how long the host needs to submit work, and
whether copies slow each other down.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.simulated import Streams
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.plan.predict.replay import Costs, Event, recomputing, replay
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed
from torchgpipe.tensors.observe import NOTHING, Task

from ..behaviours.parts.layers import Do
from .distributed.threads import GPUS, World, simulate_ranks
from .layers import partitions
from .simulated import backward_by_threads

# Each function returns the seconds of a forward, given the indices of the micro-batch and of the
# partition. All numbers are whole, so that their sums are exact.
TIMES: dict[str, Callable[[int, int], int]] = {
    "equal": lambda i, j: 1,
    "first slow": lambda i, j: 3 if j == 0 else 1,
    "last slow": lambda i, j: 1 + j,
    "middle quick": lambda i, j: 1 if j in (1, 2) else 3,
    "any": lambda i, j: Random(10 * i + j).randint(1, 5),
}

# Each value has the seconds of a copy to the next partition, and a dictionary from each skip, as a
# pair (source, target) of partitions, to the seconds of its copy. No copy takes longer than a task:
# such copies would wait for each other, which `replay` does not predict.
COPIES: dict[str, tuple[float, dict[tuple[int, int], float]]] = {
    "no time": (0.0, {}),
    "some time": (0.25, {}),
    "as long as a task": (1.0, {}),
    "a skip, no time": (0.0, {(0, 2): 0.0}),
    "a skip": (0.25, {(0, 2): 0.5}),
    "a skip that is late": (0.0, {(0, 3): 1.0}),
    "many skips": (0.25, {(0, 2): 0.5, (0, 3): 0.75, (1, 3): 1.0}),
    "skips in time": (0.25, {(0, 2): 0.5, (0, 3): 0.75, (1, 3): 0.5}),
}

# Each value says which thread runs a backward in one process. With `None`, the calling thread runs
# all of it. With a function, each device has a thread, and the function chooses the next thread to
# run. The engine "ranks" simulates one process for each rank instead.
ENGINES: dict[str, Callable[[list[int]], int] | None] = {
    "graph": None,
    "graph, first device ahead": min,
    "graph, last device ahead": max,
    "graph, by chance": Random(0).choice,
    "ranks": None,
}


def is_case(engine: str, n: int, m: int, mode: Mode, times: str, copies: str) -> bool:
    """Return whether to test this combination of engine, sizes, checkpointing and times."""
    _, skips = COPIES[copies]
    if ENGINES[engine] is not None:
        return n == 4 and m == 5
    if engine == "ranks" and m == 1:
        # With a single micro-batch, a rank also sends the state of its random generator, a tensor
        # that is always on the CPU. Simulated GPUs are CPU devices, so the simulation would take
        # this tensor for one on a GPU, and send it in the wrong way. So a single micro-batch over
        # ranks is not tested.
        return False
    if engine == "ranks" and skips:
        # A rank delays each skip from partition s to partition p by p - s - 1 tasks, so that it
        # arrives just before p needs it. If the copy of a skip takes longer than that of an
        # activation, the skip arrives late, which `replay` does not predict. The gradient of the
        # skip is delayed by as many tasks. It also arrives late if recomputations are among these
        # tasks. So such cases are not tested.
        in_time = copies in ("a skip, no time", "skips in time")
        return n == 4 and mode == "never" and times == "equal" and in_time
    if n == 1:
        return engine == "graph" and copies == "no time"
    return n == 4 or not skips


CASES = []
for _case in product(ENGINES, (1, 2, 4), (1, 2, 5), TIMES, COPIES, MODES):
    _engine, _n, _m, _times, _copies, _mode = _case
    if is_case(_engine, _n, _m, _mode, _times, _copies):
        _id = f"{_engine}, n{_n}m{_m}, {_times}, {_copies}, {_mode}"
        CASES.append(pytest.param(*_case, id=_id))


def cost(n: int, m: int, mode: Mode, times: str, copies: str) -> Costs:
    """Return the seconds of all tasks and copies, from the tables `TIMES` and `COPIES`.

    A recomputation takes as long as its forward, and a backward takes twice as long.
    """
    forward, backward, recompute = [], [], []
    recomputed = checkpointed(mode, m)
    for i in range(m):
        seconds = [float(TIMES[times](i, j)) for j in range(n)]
        forward.append(seconds)
        backward.append([2 * each for each in seconds])
        recompute.append(seconds if i < recomputed else [0.0] * n)
    copy, skips = COPIES[copies]
    return Costs(forward, backward, recompute, copy=[copy] * (n - 1), skips=skips)


@pytest.mark.parametrize(("engine", "n", "m", "times", "copies", "mode"), CASES)
def test_every_task_starts_when_the_replay_says(
    engine: str, n: int, m: int, times: str, copies: str, mode: Mode, streams: Any
) -> None:
    costs = cost(n, m, mode, times, copies)
    turns = ENGINES[engine]
    if engine == "ranks":
        found = step(costs, mode, streams, over=simulate_ranks(streams, GPUS[:n]))
    elif turns is None:
        found = step(costs, mode, streams)
    else:
        found = step(costs, mode, streams, backward_by_threads(streams, n, turns))
    assert sorted(found) == sorted(replay(costs).events)


STEPS = [
    *product([2, 4], ["no time", "some time", "as long as a task"]),
    (4, "many skips"),
]


@pytest.mark.parametrize(("n", "copies"), STEPS)
@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("times", ["equal", "last slow"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_every_task_of_a_step_starts_when_the_schedule_says(
    schedule: str, times: str, mode: Mode, m: int, n: int, copies: str, streams: Any
) -> None:
    """Check `GPipe.step` on GPUs, whose copies must not wait for later tasks of the sender."""
    costs = cost(n, m, mode, times, copies)
    if schedule != "GPipe":
        costs = replace(costs, loss=None)  # each micro-batch has a loss of its own
    found = step(costs, mode, streams, schedule=schedule)
    expected = replay(costs, recomputing(schedule, n, m)).events
    if mode == "never":
        expected = [event for event in expected if event.kind != "recompute"]
        assert sorted(found) == sorted(expected)
        return
    # The replay lets recomputations begin after the loss of the mini-batch. They can begin earlier
    # here, because the host does not wait for the loss. Nothing may begin later.
    for event, latest in zip(sorted(found), sorted(expected), strict=True):
        assert event[:3] == latest[:3]
        assert event.start <= latest.start


def test_without_dependency_threads_may_go_backward_in_another_order(streams: Any) -> None:
    costs = cost(4, 5, "always", "any", "some time")
    backward = backward_by_threads(streams, 4, max)
    found = step(costs, "always", streams, backward, dependency=False)
    assert sorted(found) != sorted(replay(costs).events)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_copies_that_take_longer_than_tasks_go_one_after_another(
    seconds: float, m: int, streams: Any
) -> None:
    """Check that copies that take long wait for each other on the simulated streams.

    Two devices are connected by one link. Therefore, the copies of a forward wait for each other,
    and so do the copies of a backward. `replay` predicts a shorter time, because it lets such
    copies run at the same time.
    """
    once = [[1.0, 1.0]] * m
    costs = Costs(forward=once, backward=once, recompute=[[0.0, 0.0]] * m, copy=[seconds])
    events = step(costs, "never", streams)
    assert max(event.end for event in events) == 2 * (1 + m * seconds + 1)
    assert replay(costs).seconds == 2 * (m + seconds + 1)


LATE_SKIPS = [[(0, 2)], [(0, 3), (1, 2)], [(0, 3), (1, 3), (0, 3), (0, 3)]]


@pytest.mark.parametrize("skips", LATE_SKIPS, ids=str)
@pytest.mark.parametrize("m", [2, 3, 6])
def test_a_skip_leaves_a_rank_late_and_with_all_others_for_its_target(
    m: int, skips: list[tuple[int, int]], checkpoint: Any, streams: Any
) -> None:
    world = simulate_ranks(streams, GPUS)
    costs = cost(4, m, checkpoint, "equal", "no time")
    step(costs, checkpoint, streams, over=world, skips=skips)

    # For each kind, source and target of messages, the number of tasks issued before each tensor.
    found = defaultdict[Any, list[int]](list)
    for issued in world.issued:
        tasks_before: Counter[str] = Counter()
        for what, *more in issued:
            if what == "send":
                kind, source, target = more
                task = kind.removesuffix(" skips")
                found[kind, source, target].append(tasks_before[task])
            else:
                tasks_before[what] += 1

    expected: dict[Any, list[int]] = {}
    for j in range(3):
        in_turn = [i + 1 for i in range(m)]
        expected["forward", j, j + 1] = in_turn
        expected["backward", j + 1, j] = in_turn
    skip_messages = {}
    for s, p in skips:
        late = []
        for i in range(m):
            tasks = min(i + p - s - 1, m - 1) + 1
            late += [tasks] * skips.count((s, p))
        for channel in (("forward skips", s, p), ("backward skips", p, s)):
            expected[channel] = late
            # All skips of a micro-batch that go to the same rank travel in one gloo message.
            skip_messages[channel] = m
    assert found == expected
    assert {
        channel: n for channel, n in world.sent.items() if "skips" in channel[0]
    } == skip_messages


def step(
    costs: Costs,
    mode: Mode,
    streams: Streams,
    backward: Callable[[Tensor], object] = Tensor.backward,
    *,
    over: World | None = None,
    skips: Iterable[tuple[int, int]] | None = None,
    schedule: str | None = None,
    **options: Any,
) -> list[Event]:
    """Run a step whose tasks take the seconds in `costs`. Return an event for each task.

    The step runs in one process, or over the simulated ranks `over`. With `schedule`, it is a call
    of `GPipe.step`.
    """
    m, n = len(costs.forward), len(costs.forward[0])
    devices = [torch.device("cpu", j) for j in range(n)]
    events: list[Event] = []

    def observer(task: Task) -> AbstractContextManager[object]:
        """Let the stream of the task's device work for the seconds that `costs` gives the task."""
        if task.kind != "copy":
            kind, i, j = task
            stream = streams.of(devices[j])
            assert stream is not None
            seconds = getattr(costs, kind)[i][j]
            start, end = stream.run(seconds)
            events.append(Event(kind, i, j, start, end))
            if over is not None:
                over.issued[j].append((kind, i))
        return NOTHING

    def layers() -> tuple[nn.Sequential, list[int]]:
        made = []
        for _ in range(n):
            scale = nn.Parameter(torch.ones(1))
            made.append(Do(lambda layer, x: x * layer.scale, scale=scale))
        return partitions(made, costs.skips if skips is None else skips, lambda x: x * 0)

    assert not isinstance(costs.copy, float)
    streams.seconds = dict(costs.skips)
    for j, seconds in enumerate(costs.copy):
        streams.seconds[j, j + 1] = seconds
    x = torch.arange(m).float()
    # Wait for all streams before the backward, as a program does that prints the loss. `replay`
    # assumes that recomputations start only after the loss. Without the wait, the host could submit
    # recomputations earlier.
    how: dict[str, Any] = {"chunks": m, "checkpoint": mode}
    if over is None:
        made, balance = layers()
        how["schedule"] = schedule or "GPipe"
        model = GPipe(made, balance, devices=devices, engine="graph", **how, **options)
        model.observer = observer
        if schedule is not None:
            model.step(lambda y, _: y.sum(), x)
            return events
        y = model(x)
        streams.synchronize()
        backward(y.sum())
        assert y.tolist() == x.tolist()
        return events

    ready = threading.Barrier(n, action=streams.synchronize, timeout=20)

    def program(rank: int) -> None:
        model = DistributedGPipe(*layers(), device=devices[rank], **how)
        model.observer = observer
        loss = model.loss(lambda y, _: y.sum(), x, None)
        ready.wait()
        loss.backward()
        assert loss.item() == sum(range(m))
        model.close()

    assert over.run(program) == [None] * n
    return events
