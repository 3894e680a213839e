"""Copies between devices: what waits for what, in both directions. In whole steps: test_simulated.py.

There may be no CUDA device here, so streams are stand-ins that write down what is asked of them (simulated.py), and two
names of the CPU are the two devices. tests/test_cuda.py runs the real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.tensors.copy import CopyStreams, Dock, Route

from ..layers import Lambda, Pop, Stash

SOURCE, TARGET = torch.device("cpu", 0), torch.device("cpu", 1)


class Passage:
    """What goes from one task to another, without the tasks."""

    def __init__(self, source: torch.device, target: torch.device, *, enabled: bool = True) -> None:
        self.route = Route(CopyStreams([source, target], enabled=enabled), 0, 1)
        self.departure, self.arrival = Dock(source), Dock(target)

    def forward(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        self.departure.leave()
        copies = self.route.copy(tensors, 0, self.departure, self.arrival)
        self.arrival.arrive(copies)
        return copies

    def backward(self, y: Tensor, x: Tensor) -> None:
        self.arrival.leave()
        y.backward(torch.ones_like(y), retain_graph=True)
        self.departure.arrive((x.grad,))


# With copy streams of their own, and without: forward, backward.
WAITS = {
    True: (
        [
            "cpu:0 copies waits for cpu:0 compute",
            "memory is used by cpu:0 copies",
            "copy to cpu:1 on cpu:0 copies and cpu:1 copies",
            "cpu:1 compute waits for cpu:1 copies",
            "memory is used by cpu:1 compute",
        ],
        [
            "cpu:1 copies waits for cpu:1 compute",
            "memory is used by cpu:1 copies",
            "copy to cpu:0 on cpu:0 copies and cpu:1 copies",
            "cpu:0 compute waits for cpu:0 copies",
            "memory is used by cpu:0 compute",
        ],
    ),
    False: (
        ["copy to cpu:1 on cpu:0 compute and cpu:1 compute"],
        ["copy to cpu:0 on cpu:0 compute and cpu:1 compute"],
    ),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["copy streams", "compute streams"])
def test_waits(streams: Any, enabled: bool) -> None:
    x = torch.rand(3, requires_grad=True)
    passage = Passage(SOURCE, TARGET, enabled=enabled)
    (y,) = passage.forward(x)
    assert streams.log == WAITS[enabled][0]
    assert torch.equal(y, x)
    for _ in range(2):
        streams.log.clear()
        x.grad = None
        passage.backward(y, x)
        assert streams.log == WAITS[enabled][1]
        assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_tensors_of_a_task_go_together(streams: Any, grad: bool) -> None:
    """By one node, so that in backward no stream waits for one gradient before the other is on its way."""
    tensors = torch.rand(3, requires_grad=True), torch.rand(3), None, torch.arange(3), torch.rand(2, requires_grad=True)
    with torch.set_grad_enabled(grad):
        copies = Passage(SOURCE, TARGET).forward(*tensors)
    assert [entry for entry in streams.log if "waits" in entry] == [WAITS[True][0][0], WAITS[True][0][3]]
    assert [y is not None and y.requires_grad for y in copies] == [grad, False, False, False, grad]
    assert all(y is None if x is None else torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))
    one, *_, other = copies
    if grad:
        assert one.grad_fn is other.grad_fn
        ((one * 2).sum() + (other * 3).sum()).backward()
        assert [x.grad.tolist() for x in (tensors[0], tensors[-1])] == [[2, 2, 2], [3, 3]]  # type: ignore[union-attr]


def test_nothing_is_copied_nor_waited_for_where_there_is_no_gradient(streams: Any) -> None:
    x, other = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0], None

    passage = Passage(SOURCE, TARGET)
    y = First.apply(other, *passage.forward(x))
    streams.log.clear()
    passage.backward(y, other)

    assert x.grad is None
    assert streams.log == []


def test_streams_use_no_memory_of_other_kinds_of_devices(streams: Any) -> None:
    # A task on CUDA may well give out a tensor that is on the host.
    dock, tensors = Dock(SOURCE), (torch.rand(3), None, torch.rand(3, device="meta"))
    stream = streams.new(SOURCE)
    dock.leave()
    dock.hold(stream, tensors)
    dock.expect(stream)
    dock.arrive(tensors)
    assert [entry for entry in streams.log if "memory" in entry] == [
        "memory is used by cpu:0 copies",
        "memory is used by cpu:0 compute",
    ]


def test_every_way_has_streams_of_its_own_that_are_kept(streams: Any) -> None:
    copies = CopyStreams([torch.device("cpu", j) for j in range(3)])
    made = {stream for way in [(0, 1), (1, 2), (0, 2)] for stream in copies.between(*way)}
    assert len(made) == 6
    assert copies.between(0, 2) == copies.between(0, 2)


def pipeline(*layers: nn.Module) -> GPipe:
    n = len(layers)
    devices = [*[SOURCE] * (n - 1), TARGET]
    return GPipe(nn.Sequential(*layers), [1] * n, devices=devices, chunks=1, checkpoint="always", engine="graph")


def by_argmax(x: Tensor) -> Tensor:
    """Return what takes no gradient."""
    return x.argmax(1)


def times(x: Any, skip: Tensor) -> Tensor:
    return skip * (x if isinstance(x, Tensor) else x[0]).unsqueeze(1)


def test_a_recomputation_does_not_wait_for_its_gradient_where_only_a_skip_has_one(streams: Any) -> None:
    log = streams.log
    model = pipeline(Stash(nn.Linear(2, 2), by_argmax), nn.Identity(), Pop(times))
    model.observer = lambda task: nullcontext(log.append(f"{task.kind} {task.partition}"))
    loss = model(torch.tensor([[0.0, 1.0], [0.0, 1.0]])).sum()
    log.clear()
    loss.backward()

    events = ["recompute 0", "cpu:0 compute waits for cpu:0 copies", "backward 0"]
    assert [entry for entry in log if entry in events] == events


def test_a_skip_is_copied_once_and_on_its_own(streams: Any) -> None:
    """Past the partition in between. An observer sees one copy of it, and one of all the rest."""
    copies: list[int] = []
    model = pipeline(Stash(nn.Linear(2, 2), by_argmax), Lambda(lambda x: (x, x + 1)), Pop(times))
    model.observer = lambda task: nullcontext(copies.extend([task.partition] * (task.kind == "copy")))  # type: ignore[func-returns-value]
    y = model(torch.rand(2, 2))
    assert copies == [1, 0]
    assert len([entry for entry in streams.log if entry.startswith("copy to cpu:1")]) == 3
    y.sum().backward()
    assert copies == [1, 0, 2]


@pytest.mark.parametrize("switch", ["copy_streams", "dependency"])
def test_switches_change_no_result(streams: Any, checkpoint: Any, switch: str) -> None:
    """Every gradient finds its way back, by whatever nodes it passes: also those of skips, and of several tensors."""
    results = []
    for on in (True, False):
        streams.log.clear()
        torch.manual_seed(0)
        relu = nn.ReLU(inplace=checkpoint == "never")  # the first to get what arrives
        keep, add = Stash(torch.sin, torch.cos), Pop(lambda x, kept: x + 3 * kept)
        layers = nn.Sequential(nn.Linear(2, 2), keep, relu, nn.Linear(2, 2), nn.Linear(2, 2), add)
        devices = [SOURCE, TARGET, torch.device("cpu", 2)]
        options: dict[str, Any] = {"checkpoint": checkpoint, "engine": "graph", switch: on}
        model = GPipe(layers, [2] * 3, devices=devices, chunks=4, **options)
        x = torch.rand(8, 2, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        assert any("waits" in entry for entry in streams.log) == (on or switch == "dependency")
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
