"""Copies between devices: which stream waits for which, in both directions. For whole steps, see test_simulated.py.

Streams are stand-ins that log their calls (simulated.py), and the devices are `cpu:0` and `cpu:1`, so no GPU is
needed. tests/test_cuda.py runs on real GPUs.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.tensors.copy import CopyPath, StreamFence

from ...behaviours.row import Row, steps, unlike
from ...behaviours.rows.passed.skips import PATTERN, paired
from ..layers import Pop, Stash

SOURCE, TARGET = torch.device("cpu", 0), torch.device("cpu", 1)


class Passage:
    """A copy between two tasks, without the tasks."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.path = CopyPath([SOURCE, TARGET], 0, 1, own=enabled)
        self.departure, self.arrival = StreamFence(SOURCE), StreamFence(TARGET)

    def forward(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        self.departure.leave()
        copies = self.path.copy(tensors, 0, self.departure, self.arrival)
        self.arrival.arrive(copies)
        return copies

    def backward(self, y: Tensor, x: Tensor) -> None:
        self.arrival.leave()
        y.backward(torch.ones_like(y), retain_graph=True)
        self.departure.arrive((x.grad,))


# With copy streams, and without: the log of forward, the log of backward.
WAITS = {
    True: [
        [
            f"{a} copies waits for {a} compute",
            f"memory is used by {a} copies",
            f"copy to {b} on cpu:0 copies and cpu:1 copies",
            f"{b} compute waits for {b} copies",
            f"memory is used by {b} compute",
        ]
        for a, b in [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")]
    ],
    False: [[f"copy to {b} on cpu:0 compute and cpu:1 compute"] for b in ("cpu:1", "cpu:0")],
}


@pytest.mark.parametrize("enabled", [True, False], ids=["copy streams", "compute streams"])
def test_waits(streams: Any, enabled: bool) -> None:
    x = torch.rand(3, requires_grad=True)
    passage = Passage(enabled=enabled)
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
    """They share one node, so that in backward all gradients are sent before a stream waits for one."""
    tensors = (
        torch.rand(3, requires_grad=True),
        torch.rand(3),
        None,
        torch.arange(3),
        torch.rand(2, requires_grad=True),
    )
    with torch.set_grad_enabled(grad):
        copies = Passage().forward(*tensors)
    assert [entry for entry in streams.log if "waits" in entry] == [
        WAITS[True][0][0],
        WAITS[True][0][3],
    ]
    assert [y is not None and y.requires_grad for y in copies] == [grad, False, False, False, grad]
    assert all(
        y is None if x is None else torch.equal(x, y) for x, y in zip(tensors, copies, strict=True)
    )
    one, *_, other = copies
    if grad:
        assert one.grad_fn is other.grad_fn
        ((one * 2).sum() + (other * 3).sum()).backward()
        assert [x.grad.tolist() for x in (tensors[0], tensors[-1])] == [[2, 2, 2], [3, 3]]  # type: ignore[union-attr]


def test_nothing_is_copied_nor_waited_for_where_there_is_no_gradient(streams: Any) -> None:
    passage = Passage()
    (y,) = passage.forward(torch.rand(3, requires_grad=True))
    streams.log.clear()
    passage.arrival.leave()
    grads = y.grad_fn.apply(None)
    passage.departure.arrive(grads[-1:])
    assert {*grads} == {None}
    assert streams.log == []


def test_streams_use_no_memory_of_other_kinds_of_devices(streams: Any) -> None:
    # A task on CUDA may return a tensor on the host.
    fence, tensors = StreamFence(SOURCE), (torch.rand(3), None, torch.rand(3, device="meta"))
    stream = streams.new(SOURCE)
    fence.leave()
    fence.hold(stream, tensors)
    fence.expect(stream)
    fence.arrive(tensors)
    assert [entry for entry in streams.log if "memory" in entry] == [
        "memory is used by cpu:0 copies",
        "memory is used by cpu:0 compute",
    ]


def test_a_recomputation_does_not_wait_for_its_gradient_where_only_a_skip_has_one(
    streams: Any,
) -> None:
    layers = (
        Stash(nn.Linear(2, 2), lambda x: x.argmax(1)),
        nn.Identity(),
        Pop(lambda x, skip: skip * x.unsqueeze(1)),
    )
    devices = [SOURCE, SOURCE, TARGET]
    model = GPipe(
        nn.Sequential(*layers), [1] * 3, devices=devices, checkpoint="always", engine="graph"
    )
    model.observer = lambda task: nullcontext(streams.log.append(f"{task.kind} {task.partition}"))
    loss = model(torch.tensor([[0.0, 1.0], [0.0, 1.0]])).sum()
    streams.log.clear()
    loss.backward()
    events = ["recompute 0", "cpu:0 compute waits for cpu:0 copies", "backward 0"]
    assert [entry for entry in streams.log if entry in events] == events


@pytest.mark.parametrize("options", [{}, {"copy_streams": False}, {"dependency": False}])
def test_steps_are_those_of_plain_layers(
    streams: Any, checkpoint: str, options: dict[str, bool]
) -> None:
    """All gradients are right, also those of skips."""
    row = Row(
        "skips between devices",
        partial(paired, PATTERN),
        balance=(2, 2, 3),
        use=steps,
        options=options,
    )
    assert unlike(row, "", "graph", checkpoint, ["cpu:0", "cpu:1", "cpu:2"]) == []
    assert any("waits" in entry for entry in streams.log) == options.get("copy_streams", True)
