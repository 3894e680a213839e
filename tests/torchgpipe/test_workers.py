"""The workers engine: partitions really run at once, forward and backward, in threads that live on."""

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
from torchgpipe.checkpoint import checkpointed, is_recomputing
from torchgpipe.observe import Task
from torchgpipe.schedule import clock_cycles

# Long enough for a busy machine. It passes only if the other side is there, however long that takes.
WAIT = 120


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


def test_recomputation_starts_before_its_gradient_arrives() -> None:
    # Partition 0 recomputes (1, 0), its third run, while partition 1 is still in the backward that it waits for.
    barrier = threading.Barrier(2)
    model = pipeline(Meet(barrier, forward=2), Meet(barrier, backward=0), chunks=2, checkpoint="always")
    model(torch.ones(2, 1)).sum().backward()
    assert model[0].calls == [4, 2]


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


def gpipe_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("gpipe-")}


def assert_ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_end_with_the_pipeline() -> None:
    before = gpipe_threads()
    model = pipeline(Where(), Where(), Where(), chunks=2)
    assert gpipe_threads() <= before
    model(torch.ones(2, 1))
    ours = gpipe_threads() - before
    assert len(ours) == 2
    del model
    gc.collect()
    assert_ended(ours)


class SlowAgain(Where):
    """Take its time in recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            time.sleep(0.02)
        return super().forward(x)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_no_recomputation_before_there_is_a_use_for_it(checkpoint: Any) -> None:
    n, m = 3, 4
    seen: list[tuple[str, Task]] = []

    class Note:
        def __init__(self, task: Task) -> None:
            self.task = task

        def __enter__(self) -> None:
            seen.append(("begin", self.task))

        def __exit__(self, *_: object) -> None:
            seen.append(("end", self.task))

    model = pipeline(*(SlowAgain() for _ in range(n)), chunks=m, checkpoint=checkpoint)
    model.observer = Note
    model(torch.ones(m, 1)).sum().backward()

    def recomputed(what: str, i: int, j: int) -> int:
        return seen.index((what, Task("recompute", i, j)))

    for i in range(checkpointed(checkpoint, m)):
        for j in range(1, n):
            # The gradient that it is for is on the way.
            assert recomputed("end", i, j) < recomputed("begin", i, j - 1)
            # The gradient before it was taken, which is after the recomputation that this one is for.
            if i + 1 < checkpointed(checkpoint, m):
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


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("m", "n"), [(2, 2), (4, 2), (2, 4), (4, 3), (5, 4)])
def test_every_clock_cycle_runs_at_once(m: int, n: int, checkpoint: str) -> None:
    tasks = [len(cycle) for cycle in clock_cycles(m, n)]
    cycles = {direction: [threading.Barrier(parties) for parties in tasks] for direction in ("forward", "backward")}
    layers = [LockStep(j, n, cycles) for j in range(n)]
    model = pipeline(*layers, chunks=m, checkpoint=checkpoint)

    model(torch.rand(m, 2)).sum().backward()

    assert [layer.place for layer in layers] == [{"forward": j + m, "backward": j - 1} for j in range(n)]


@pytest.mark.parametrize(("chunks", "n"), [(1, 3), (4, 1)])
def test_no_thread_where_nothing_can_overlap(chunks: int, n: int) -> None:
    before = set(threading.enumerate())
    model = pipeline(*(Where() for _ in range(n)), chunks=chunks)
    model(torch.ones(4, 1)).sum().backward()
    assert set(threading.enumerate()) <= before


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_pipelines_side_by_side(checkpoint: str) -> None:
    """Each in a thread of its own; they meet in the middle of their forwards, so both are under way at once."""
    barrier = threading.Barrier(2)
    models = [pipeline(Meet(barrier, forward=1), nn.Linear(2, 2), chunks=2, checkpoint=checkpoint) for _ in "ab"]
    inputs = [torch.rand(4, 2), torch.rand(4, 2)]
    found: dict[int, list[Tensor]] = {}

    def train(k: int) -> None:
        found[k] = gradients_of(models[k], inputs[k])

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)

    for k, model in enumerate(models):
        assert all(map(torch.equal, found[k], gradients_of(model, inputs[k])))


def test_one_pipeline_in_a_layer_of_another() -> None:
    inner = pipeline(nn.Linear(2, 2), nn.Linear(2, 2), chunks=2, checkpoint="never")
    outer = pipeline(nn.Linear(2, 2), inner, nn.Linear(2, 2), chunks=2, checkpoint="never")
    x = torch.rand(8, 2)

    found = gradients_of(outer, x)
    outer.zero_grad()
    for part in x.chunk(2):
        between = torch.cat([inner[1](inner[0](p)) for p in outer[0](part).chunk(2)])
        outer[2](between).square().sum().backward()

    for gradient, parameter in zip(found, outer.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)


def test_one_pipeline_called_from_several_threads() -> None:
    model = pipeline(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), chunks=2)
    inputs = [torch.rand(4, 2) for _ in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    found: dict[int, Tensor] = {}

    def infer(k: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                found[k] = model(inputs[k])

    threads = [threading.Thread(target=infer, args=(k,), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)

    assert all(torch.equal(found[k], expected[k]) for k in range(4))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_output_outlives_its_pipeline(checkpoint: str) -> None:
    weight = nn.Parameter(torch.ones(()))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    before = gpipe_threads()
    loss = pipeline(Scale(), Scale(), chunks=2, checkpoint=checkpoint)(torch.ones(4, 1)).sum()

    backward = threading.Thread(target=loss.backward, daemon=True)
    backward.start()
    backward.join(WAIT)

    assert weight.grad is not None
    assert weight.grad.item() == 8
    assert_ended(gpipe_threads() - before)


def test_a_layer_that_knows_its_pipeline_does_not_keep_it() -> None:
    class Knows(nn.Linear):
        pipeline: object

    layer = Knows(2, 2)
    model = pipeline(layer, nn.Linear(2, 2), chunks=2)
    layer.__dict__["pipeline"] = model
    before = gpipe_threads()
    model(torch.rand(4, 2))
    ours = gpipe_threads() - before
    gone = weakref.ref(model)

    del model, layer
    gc.collect()

    assert gone() is None
    assert_ended(ours)


def order(engine: Any, checkpoint: str, m: int, n: int) -> list[list[tuple[str, int]]]:
    """Return the tasks of backward, by partition, as layers see them."""
    seen: list[list[tuple[str, int]]] = [[] for _ in range(n)]

    class Note(nn.Linear):
        def __init__(self, j: int) -> None:
            super().__init__(2, 2)
            self.j = j

        def forward(self, x: Tensor) -> Tensor:
            # The micro-batch's number is in the data, out of reach of the weights.
            i = int(x[0, 1])
            if is_recomputing():
                seen[self.j].append(("recompute", i))
            y = torch.stack([super().forward(x)[:, 0], x[:, 1]], 1)
            if y.requires_grad:
                y.register_hook(lambda _: seen[self.j].append(("backward", i)))
            return y

    model = pipeline(*(Note(j) for j in range(n)), chunks=m, checkpoint=checkpoint, engine=engine)
    model(torch.stack([torch.rand(m), torch.arange(m)], 1)).sum().backward()
    return seen


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (3, 1), (3, 2), (2, 4), (5, 3)])
def test_both_engines_go_backward_in_one_order(m: int, n: int, checkpoint: Any) -> None:
    count = checkpointed(checkpoint, m)
    documented = [
        step for i in reversed(range(m)) for step in ([("recompute", i)] if i < count else []) + [("backward", i)]
    ]
    assert order("workers", checkpoint, m, n) == order("graph", checkpoint, m, n) == [documented] * n


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
