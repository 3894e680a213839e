"""Engines on simulated devices: each task starts at the time of the replay, so no stream waits without need.

The engines, their waits, copies, links and wires are real. Streams and NCCL are stand-ins with clocks (simulated.py). A
layer occupies its partition's compute stream for the given time of its task. So this tests which work is submitted to
the streams, and in which order, by a host that takes no time. Only GPUs can show how real streams behave, how long the
host takes to submit work, and whether copies slow each other down.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.simulated import Streams
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.plan.replay import Costs, Event, replay
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed
from torchgpipe.tensors.observe import NOTHING, Task

from ..behaviours.parts.layers import Do
from .distributed.threads import GPUS, World, simulate_ranks
from .layers import partitions
from .simulated import backward_by_threads

# Seconds of a forward by micro-batch and partition. They are whole numbers, so that sums are exact.
TIMES: dict[str, Callable[[int, int], int]] = {
    "equal": lambda i, j: 1,
    "first slow": lambda i, j: 3 if j == 0 else 1,
    "last slow": lambda i, j: 1 + j,
    "middle quick": lambda i, j: 1 if j in (1, 2) else 3,
    "any": lambda i, j: Random(10 * i + j).randint(1, 5),
}

# Seconds of each copy to the next partition, and of skips. No copy takes longer than a task: it would have to queue.
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

# How backward runs in one process. `None`: in the calling thread; a function: in a thread per device, and the function
# chooses the next device. Each rank has its own process.
ENGINES: dict[str, Callable[[list[int]], int] | None] = {
    "graph": None,
    "graph, first device ahead": min,
    "graph, last device ahead": max,
    "graph, by chance": Random(0).choice,
    "ranks": None,
}


def is_case(engine: str, n: int, m: int, mode: Mode, times: str, copies: str) -> bool:
    """Whether to run this case. Ranks send skips late, in time only if they take no longer than other tensors."""
    skips = bool(COPIES[copies][1])
    if ENGINES[engine] is not None:
        return n == 4 and m == 5
    if (
        engine == "ranks" and m == 1
    ):  # a single micro-batch also carries the RNG state, here as if from a GPU
        return False
    if engine == "ranks" and skips:
        # With recomputation, p - s - 1 tasks take longer than the path of the gradient.
        return (
            n == 4
            and mode == "never"
            and times == "equal"
            and copies in ("a skip, no time", "skips in time")
        )
    return n == 4 or not skips if n > 1 else engine == "graph" and copies == "no time"


CASES = [
    pytest.param(
        engine, n, m, times, copies, mode, id=f"{engine}, n{n}m{m}, {times}, {copies}, {mode}"
    )
    for engine in ENGINES
    for n in (1, 2, 4)
    for m in (1, 2, 5)
    for times in TIMES
    for copies in COPIES
    for mode in MODES
    if is_case(engine, n, m, mode, times, copies)
]


def cost(n: int, m: int, mode: Mode, times: str, copies: str) -> Costs:
    """Return costs: backward takes twice as long as forward, recomputation as long as forward."""
    forward = [[float(TIMES[times](i, j)) for j in range(n)] for i in range(m)]
    recomputed = checkpointed(mode, m)
    copy, skips = COPIES[copies]
    return Costs(
        forward=forward,
        backward=[[2 * seconds for seconds in row] for row in forward],
        recompute=[row if i < recomputed else [0.0] * n for i, row in enumerate(forward)],
        copy=[copy] * (n - 1),
        skips=skips,
    )


@pytest.mark.parametrize(("engine", "n", "m", "times", "copies", "mode"), CASES)
def test_every_task_starts_when_the_replay_says(
    engine: str, n: int, m: int, times: str, copies: str, mode: Mode, streams: Any
) -> None:
    costs = cost(n, m, mode, times, copies)
    if engine == "ranks":
        found = step(costs, mode, streams, over=simulate_ranks(streams, GPUS[:n]))
    else:
        turns = ENGINES[engine]
        backward = Tensor.backward if turns is None else backward_by_threads(streams, n, turns)
        found = step(costs, mode, streams, backward)
    assert sorted(found) == sorted(replay(costs).events)


def test_without_dependency_threads_may_go_backward_in_another_order(streams: Any) -> None:
    costs = cost(4, 5, "always", "any", "some time")
    found = step(costs, "always", streams, backward_by_threads(streams, 4, max), dependency=False)
    assert sorted(found) != sorted(replay(costs).events)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_copies_that_take_longer_than_tasks_go_one_after_another(
    seconds: float, m: int, streams: Any
) -> None:
    """Copies queue on the streams, in both directions, because two devices have one link. In the replay they do not."""
    once = [[1.0, 1.0]] * m
    costs = Costs(forward=once, backward=once, recompute=[[0.0, 0.0]] * m, copy=[seconds])
    events = step(costs, "never", streams)
    assert max(event.end for event in events) == 2 * (1 + m * seconds + 1)
    assert replay(costs).seconds == 2 * (m + seconds + 1)


@pytest.mark.parametrize(
    "skips", [[(0, 2)], [(0, 3), (1, 2)], [(0, 3), (1, 3), (0, 3), (0, 3)]], ids=str
)
@pytest.mark.parametrize("m", [2, 3, 6])
def test_a_skip_leaves_a_rank_late_and_with_all_others_for_its_target(
    m: int, skips: list[tuple[int, int]], checkpoint: Any, streams: Any
) -> None:
    world = simulate_ranks(streams, GPUS)
    step(cost(4, m, checkpoint, "equal", "no time"), checkpoint, streams, over=world, skips=skips)

    # For every wire, the number of tasks issued before each tensor.
    found = defaultdict[Any, list[int]](list)
    for issued in world.issued:
        for at, (what, *wire) in enumerate(issued):
            if what == "send":
                found[tuple(wire)].append(
                    sum(wire[0].startswith(str(task)) for task, *_ in issued[:at])
                )

    expected: dict[Any, list[int]] = {}
    for j in range(3):
        expected["forward", j, j + 1] = expected["backward", j + 1, j] = [i + 1 for i in range(m)]
    for s, p in skips:
        late = [min(i + p - s - 1, m - 1) + 1 for i in range(m) for _ in range(skips.count((s, p)))]
        expected["forward skips", s, p] = expected["backward skips", p, s] = late
    assert found == expected
    # All skips of a micro-batch to one rank are one gloo message.
    assert {wire: count for wire, count in world.sent.items() if "skips" in wire[0]} == {
        wire: m for wire in expected if "skips" in wire[0]
    }


def step(
    costs: Costs,
    mode: Mode,
    streams: Streams,
    backward: Callable[[Tensor], object] = Tensor.backward,
    *,
    over: World | None = None,
    skips: Iterable[tuple[int, int]] | None = None,
    **options: Any,
) -> list[Event]:
    """Run one step of a pipeline with these costs, in one process or over ranks; return the events of its tasks."""
    m, n = len(costs.forward), len(costs.forward[0])
    devices, events = [torch.device("cpu", j) for j in range(n)], list[Event]()

    def observer(task: Task) -> AbstractContextManager[object]:
        """Occupy the partition's stream."""
        if task.kind != "copy":
            kind, i, j = task
            stream = streams.of(devices[j])
            assert stream is not None
            events.append(Event(kind, i, j, *stream.run(getattr(costs, kind)[i][j])))
            if over is not None:
                over.issued[j].append((kind, i))
        return NOTHING

    def layers() -> tuple[nn.Sequential, list[int]]:
        made = [
            Do(lambda layer, x: x * layer.scale, scale=nn.Parameter(torch.ones(1)))
            for _ in range(n)
        ]
        return partitions(made, costs.skips if skips is None else skips, lambda x: x * 0)

    assert not isinstance(costs.copy, float)
    streams.seconds = {
        **{(j, j + 1): seconds for j, seconds in enumerate(costs.copy)},
        **costs.skips,
    }
    x = torch.arange(m).float()
    # Synchronize before backward, as printing the loss would. In the replay, recomputation starts only after the loss;
    # a fast host would submit it earlier.
    if over is None:
        model = GPipe(
            *layers(), devices=devices, chunks=m, checkpoint=mode, engine="graph", **options
        )
        model.observer = observer
        y = model(x)
        streams.synchronize()
        backward(y.sum())
        assert y.tolist() == x.tolist()
        return events

    ready = threading.Barrier(n, action=streams.synchronize, timeout=20)

    def program(rank: int) -> None:
        model = DistributedGPipe(*layers(), device=devices[rank], chunks=m, checkpoint=mode)
        model.observer = observer
        loss = model.loss(lambda y, _: y.sum(), x, None)
        ready.wait()
        loss.backward()
        assert loss.item() == sum(range(m))
        model.close()

    assert over.run(program) == [None] * n
    return events
