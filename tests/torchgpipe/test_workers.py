"""The workers engine: partitions really run at once, forward and backward, and recompute in time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import Mode, checkpointed, is_recomputing
from torchgpipe.observe import Task
from torchgpipe.schedule import clock_cycles

from ..plain import piped

# Long enough for a busy machine. It passes only if the other side is there, however long that takes.
WAIT = 120


def pipeline(*layers: nn.Module, chunks: int, checkpoint: Any = "never") -> GPipe:
    return piped(nn.Sequential(*layers), [1] * len(layers), chunks, checkpoint=checkpoint, engine="workers")


class Meet(nn.Module):
    """Wait, in one call of forward or backward, until the other partition's layer waits too."""

    def __init__(self, barrier: threading.Barrier, *, forward: int = -1, backward: int = -1) -> None:
        super().__init__()
        self.barrier, self.calls, self.meets = barrier, [0, 0], [forward, backward]
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.call(0)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self.call(1))
        return y

    def call(self, direction: int) -> None:
        if self.calls[direction] == self.meets[direction]:
            self.barrier.wait(WAIT)
        self.calls[direction] += 1


def test_recomputation_starts_before_its_gradient_arrives() -> None:
    # Partition 0 recomputes (1, 0), its third run, while partition 1 is still in the backward that it waits for.
    barrier = threading.Barrier(2)
    model = pipeline(Meet(barrier, forward=2), Meet(barrier, backward=0), chunks=2, checkpoint="always")
    model(torch.ones(2, 1)).sum().backward()
    assert model[0].calls == [4, 2]


class Where(nn.Linear):
    """Note the threads of first and second passes; take some time in the second."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.threads: dict[bool, set[threading.Thread]] = {False: set(), True: set()}

    def forward(self, x: Tensor) -> Tensor:
        self.threads[is_recomputing()].add(threading.current_thread())
        time.sleep(0.02 * is_recomputing())
        return super().forward(x)


def test_each_partition_has_a_thread_of_its_own_for_good() -> None:
    model = pipeline(Where(), Where(), Where(), chunks=3, checkpoint="always")
    for _ in range(3):
        model(torch.ones(3, 2)).sum().backward()
    threads = [layer.threads[False] for layer in model]
    assert [len(t) for t in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3
    assert [layer.threads[True] for layer in model] == threads
    # The last partition's is the caller's, which would only wait.
    assert threads[2] == {threading.current_thread()}


@pytest.mark.parametrize("chunks, n", [(1, 3), (4, 1)])
def test_no_thread_where_nothing_can_overlap(chunks: int, n: int) -> None:
    before = set(threading.enumerate())
    model = pipeline(*(nn.Linear(2, 2) for _ in range(n)), chunks=chunks)
    model(torch.ones(4, 2)).sum().backward()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_no_recomputation_before_there_is_a_use_for_it(checkpoint: Mode) -> None:
    n, m = 3, 4
    seen: list[tuple[str, Task]] = []

    class Note:
        def __init__(self, task: Task) -> None:
            self.task = task

        def __enter__(self) -> None:
            seen.append(("begin", self.task))

        def __exit__(self, *_: object) -> None:
            seen.append(("end", self.task))

    model = pipeline(*(Where() for _ in range(n)), chunks=m, checkpoint=checkpoint)
    model.observer = Note
    loss = model(torch.ones(m, 2)).sum()
    seen.clear()
    loss.backward()

    count = checkpointed(checkpoint, m)
    for j in range(n):
        kinds = [(kind, i) for i in reversed(range(m)) for kind in ["recompute"] * (i < count) + ["backward"]]
        assert [task[:2] for what, task in seen if (what, task.partition) == ("begin", j)] == kinds

    def recomputed(what: str, i: int, j: int) -> int:
        return seen.index((what, Task("recompute", i, j)))

    for i in range(count):
        for j in range(1, n):
            # The gradient that it is for is on the way.
            assert recomputed("end", i, j) < recomputed("begin", i, j - 1)
            # The gradient before it was taken, which is after the recomputation that this one is for.
            if i + 1 < count:
                assert recomputed("end", i + 1, j - 1) < recomputed("begin", i, j)


class LockStep(nn.Module):
    """Meet all other tasks of the same clock cycle, in forward and in backward."""

    def __init__(self, j: int, n: int, cycles: dict[str, list[threading.Barrier]]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        # Backward's cycles are those of forward, from last to first.
        self.place = {"forward": j, "backward": j + len(cycles["backward"]) - n}
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.meet("forward", 1)
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.meet("backward", -1))
        return y

    def meet(self, direction: str, step: int) -> None:
        k = self.place[direction]
        self.place[direction] += step
        self.cycles[direction][k].wait(WAIT)


@pytest.mark.parametrize("m, n", [(2, 2), (4, 2), (2, 4), (4, 3), (5, 4)])
def test_every_clock_cycle_runs_at_once(m: int, n: int, checkpoint: str) -> None:
    tasks = [len(cycle) for cycle in clock_cycles(m, n)]
    cycles = {direction: [threading.Barrier(parties) for parties in tasks] for direction in ("forward", "backward")}
    layers = [LockStep(j, n, cycles) for j in range(n)]
    model = pipeline(*layers, chunks=m, checkpoint=checkpoint)

    model(torch.rand(m, 2)).sum().backward()

    assert [layer.place for layer in layers] == [{"forward": j + m, "backward": j - 1} for j in range(n)]


def test_a_layer_that_knows_its_pipeline_does_not_keep_it() -> None:
    layer = nn.Linear(2, 2)
    model = pipeline(layer, nn.Linear(2, 2), chunks=2)
    layer.__dict__["pipeline"] = model
    before = set(threading.enumerate())
    model(torch.rand(4, 2))
    threads = set(threading.enumerate()) - before
    gone = weakref.ref(model)

    del model, layer
    gc.collect()

    assert gone() is None
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


class Draw(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_generator_that_two_partitions_would_draw_from_at_once_is_refused(checkpoint: str) -> None:
    draws = [Draw(torch.Generator())] * 2
    x = torch.ones(2, 1, requires_grad=True)
    pipeline(nn.Sequential(*draws), nn.Tanh(), chunks=2, checkpoint=checkpoint)(x)
    model = pipeline(draws[0], nn.Sequential(draws[1]), chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match=r"several partitions draw from one torch\.Generator.*give each layer"):
        model(x)
