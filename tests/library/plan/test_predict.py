"""What a prediction takes from the hardware that it is for: on a CPU, what cannot overlap runs in one thread."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.hardware import load_hardware
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.tensors.observe import Task

GPU = replace(load_hardware("p40x8"), link_latency=0.0)
CPU = replace(GPU, launch_overlaps=False)
X = torch.ones(8, 256)


def model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.Tanh())))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("balance", [(4,), (2, 2), (1, 1, 2)])
def test_tasks_come_in_the_order_in_which_a_cpu_runs_them(balance: tuple[int, ...], chunks: int) -> None:
    """In one thread, recomputation belongs to its task's backward; with several, it need not wait for the gradient."""
    ran: list[Task] = []
    gpipe = GPipe(model(), list(balance), devices=["cpu"] * len(balance), chunks=chunks, checkpoint="always")
    gpipe.observer = lambda task: nullcontext(ran.append(task))  # type: ignore[func-returns-value]
    gpipe(X).sum().backward()
    kinds = [(task.kind, task.micro_batch, task.partition) for task in ran if task.kind != "forward"]

    setup = Setup(len(X), balance, chunks, "always")
    predictor = Predictor(count(model(), X), CPU)
    events = sorted(predictor.step(setup).timeline.events, key=lambda event: event.start)
    predicted = [event[:3] for event in events if event.kind != "forward"]
    costs = predictor.costs(setup)
    overlap = chunks > 1 and len(balance) > 1
    assert (predictor.step(setup).timeline.seconds < 0.9 * costs.total) == overlap
    assert overlap or predicted == kinds
    for j in range(len(balance)):
        assert [x for x in predicted if x[2] == j] == [x for x in kinds if x[2] == j]
    on_gpu = Predictor(predictor.counts, GPU).costs(setup)
    assert (costs.ahead, on_gpu.ahead) == (overlap, True)


def test_on_a_cpu_one_thread_updates_the_parameters_of_all_partitions() -> None:
    counts = count(model(), X)
    for node, shared in ((replace(CPU, launch=0.0), 1.0), (replace(GPU, launch=0.0), 0.5)):
        one, two = (
            Predictor(counts, node).step(Setup(len(X), balance, 1, "never", optimizer_named("adam", foreach=False)))
            for balance in ((4,), (2, 2))
        )
        assert two.optimizer == pytest.approx(shared * one.optimizer)


def test_gradients_that_are_set_to_zero_are_added_to_by_every_micro_batch() -> None:
    """Adding reads both and writes the sum; setting to zero only writes."""
    counts, node = count(model(), X), replace(GPU, launch=0.0)
    plain = Setup(len(X), (4,), 2, "never", optimizer_named("sgd", foreach=False))
    dropped, zeroed = (Predictor(counts, node).step(setup) for setup in (plain, replace(plain, zeroed=True)))
    once = sum(p.nbytes for p in model().parameters()) / node.memory_bandwidth / node.memory_efficiency["elementwise"]
    assert zeroed.timeline.seconds - dropped.timeline.seconds == pytest.approx(3 * once)
    assert zeroed.optimizer - dropped.optimizer == pytest.approx(once)
