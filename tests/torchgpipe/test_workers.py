"""The workers engine: partitions really run at once, forward and backward, in threads that live on."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import is_recomputing
from torchgpipe.observe import Task

# Long enough for a busy machine. It passes only if the other side is there, however long that takes.
WAIT = 30


class Meet(nn.Module):
    """Wait, in chosen calls of forward or backward, until the other partition's layer waits too."""

    def __init__(self, barrier: threading.Barrier, *, forward: int = -1, backward: int = -1) -> None:
        super().__init__()
        self.barrier, self.calls, self.forward_call, self.backward_call = barrier, [0, 0], forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.meet(0, self.forward_call)
        return _Meet.apply(self, x * self.weight)  # type: ignore[no-any-return]

    def meet(self, direction: int, call: int) -> None:
        if self.calls[direction] == call:
            self.barrier.wait(WAIT)
        self.calls[direction] += 1


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Meet, x: Tensor) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.layer.meet(1, ctx.layer.backward_call)
        return None, grads[0]


def pipeline(*layers: nn.Module, chunks: int, checkpoint: Any = "never", engine: Any = "workers") -> GPipe:
    n = len(layers)
    return GPipe(
        nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, chunks=chunks, checkpoint=checkpoint, engine=engine
    )


def test_forward_tasks_of_a_clock_cycle_overlap() -> None:
    # Cycle 1 holds tasks (1, 0) and (0, 1): partition 0's second call, partition 1's first.
    barrier = threading.Barrier(2)
    model = pipeline(Meet(barrier, forward=1), Meet(barrier, forward=0), chunks=2)
    assert torch.equal(model(torch.ones(2, 1)), torch.ones(2, 1))


def test_backward_tasks_overlap() -> None:
    # Backward of (1, 0) runs beside that of (0, 1): partition 0's first call, partition 1's second.
    barrier = threading.Barrier(2)
    model = pipeline(Meet(barrier, backward=0), Meet(barrier, backward=1), chunks=2)
    model(torch.ones(2, 1)).sum().backward()
    assert [layer.weight.grad for layer in model] == [2, 2]


def test_recomputation_starts_before_its_gradient_arrives() -> None:
    # Partition 0 recomputes (1, 0), its third run, while partition 1 is still in the backward that it waits for.
    barrier = threading.Barrier(2)
    model = pipeline(Meet(barrier, forward=2), Meet(barrier, backward=0), chunks=2, checkpoint="always")
    model(torch.ones(2, 1)).sum().backward()
    assert model[0].calls == [4, 2]


def test_all_partitions_of_a_cycle_overlap() -> None:
    barrier = threading.Barrier(4)
    model = pipeline(*(Meet(barrier, forward=3 - j) for j in range(4)), chunks=4)
    assert model(torch.ones(4, 1)).shape == (4, 1)


class Where(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.threads: set[int] = set()
        self.recomputed: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        (self.recomputed if is_recomputing() else self.threads).add(threading.get_ident())
        return x * self.weight


def test_each_partition_has_a_thread_of_its_own_for_good() -> None:
    model = pipeline(Where(), Where(), Where(), chunks=3, checkpoint="always")
    for _ in range(3):
        model(torch.ones(3, 1)).sum().backward()
    threads = [layer.threads for layer in model]
    assert [len(t) for t in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3
    assert [layer.recomputed for layer in model] == threads
    # The last partition's is the caller's, which would only wait.
    assert threads[2] == {threading.get_ident()}


def gpipe_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpipe-")]


def test_threads_end_with_the_pipeline() -> None:
    gc.collect()
    before = len(gpipe_threads())
    model = pipeline(Where(), Where(), Where(), chunks=2)
    assert len(gpipe_threads()) == before
    model(torch.ones(2, 1))
    ours = [t for t in threading.enumerate() if t.name.startswith("gpipe-")][before:]
    assert len(ours) == 2
    del model
    gc.collect()
    for thread in ours:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in ours)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_backward_order_within_a_partition(checkpoint: str) -> None:
    seen: list[Task] = []
    lock = threading.Lock()

    class Note:
        def __init__(self, task: Task) -> None:
            self.task = task

        def __enter__(self) -> None:
            with lock:
                seen.append(self.task)

        def __exit__(self, *_: object) -> None:
            pass

    model = pipeline(Where(), Where(), chunks=3, checkpoint=checkpoint)
    model.observer = Note
    model(torch.ones(3, 1)).sum().backward()
    recomputed = {"always": {0, 1, 2}, "except_last": {0, 1}, "never": set()}[checkpoint]
    for j in range(2):
        order = [(t.kind, t.micro_batch) for t in seen if t.partition == j]
        backward = [[("recompute", i)] * (i in recomputed) + [("backward", i)] for i in (2, 1, 0)]
        assert order == [("forward", i) for i in range(3)] + [step for steps in backward for step in steps]


def test_short_tasks_take_turns_without_blocking_each_other() -> None:
    # After a mini-batch of short tasks, partitions take turns; one that waits for another must still get there.
    barrier = threading.Barrier(2)
    first, second = Meet(barrier), Meet(barrier)
    model = pipeline(first, second, chunks=2)
    model(torch.ones(2, 1))
    model._engine.task_seconds = 0.0  # type: ignore[union-attr]
    first.forward_call, second.forward_call = first.calls[0] + 1, second.calls[0]
    assert torch.equal(model(torch.ones(2, 1)), torch.ones(2, 1))
    assert barrier.n_waiting == 0 and not barrier.broken
