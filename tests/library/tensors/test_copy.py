"""Test copies between devices: which streams wait for which others, in forward and in backward.

The devices `cpu:0` and `cpu:1` have simulated streams that keep a log, so the tests need no GPU.
Whole steps are tested in test_simulated.py, and real GPUs in tests/test_cuda.py.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.tensors.copy import CopyPath, StreamFence
from torchgpipe.tensors.observe import Task

from ...behaviours.row import Row, steps, unlike
from ...behaviours.rows.passed.skips import PATTERN, paired
from ..layers import Pop, Stash

SOURCE, TARGET = torch.device("cpu", 0), torch.device("cpu", 1)


class Passage:
    """A connection that copies tensors from device `cpu:0` to `cpu:1`, as between two tasks."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.path = CopyPath({0: SOURCE, 1: TARGET}, 0, 1, own=enabled)
        self.departure = StreamFence(SOURCE)
        self.arrival = StreamFence(TARGET)

    def forward(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        self.departure.leave()
        copies = self.path.copy(tensors, 0, (self.departure, self.arrival))
        self.arrival.arrive(copies)
        return copies

    def backward(self, y: Tensor, x: Tensor) -> None:
        self.arrival.leave()
        y.backward(torch.ones_like(y), retain_graph=True)
        self.departure.arrive((x.grad,))


def log_of_a_copy(source: str, target: str) -> list[str]:
    """Return the log entries that one copy must cause if it runs on copy streams."""
    return [
        f"{source} copies waits for {source} compute",
        f"memory is used by {source} copies",
        f"copy to {target} on cpu:0 copies and cpu:1 copies",
        f"{target} compute waits for {target} copies",
        f"memory is used by {target} compute",
    ]


# With copy streams and without: the expected log of forward, and the expected log of backward.
WAITS = {
    True: (log_of_a_copy("cpu:0", "cpu:1"), log_of_a_copy("cpu:1", "cpu:0")),
    False: (
        ["copy to cpu:1 on cpu:0 compute and cpu:1 compute"],
        ["copy to cpu:0 on cpu:0 compute and cpu:1 compute"],
    ),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["copy streams", "compute streams"])
def test_waits(streams: Any, enabled: bool) -> None:
    x = torch.rand(3, requires_grad=True)
    passage = Passage(enabled=enabled)
    forward, backward = WAITS[enabled]
    (y,) = passage.forward(x)
    assert streams.log == forward
    assert torch.equal(y, x)
    for _ in range(2):
        streams.log.clear()
        x.grad = None
        passage.backward(y, x)
        assert streams.log == backward
        assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_tensors_of_a_task_go_together(streams: Any, grad: bool) -> None:
    """Check that all tensors of a task are copied together, with only one autograd node.

    As a result, backward starts to copy all gradients before any stream waits for one of them.
    """
    first = torch.rand(3, requires_grad=True)
    last = torch.rand(2, requires_grad=True)
    tensors = (first, torch.rand(3), None, torch.arange(3), last)

    with torch.set_grad_enabled(grad):
        copies = Passage().forward(*tensors)

    forward, _ = WAITS[True]
    expected_waits = [entry for entry in forward if "waits" in entry]
    assert [entry for entry in streams.log if "waits" in entry] == expected_waits
    for x, y in zip(tensors, copies, strict=True):
        if x is None:
            assert y is None
        else:
            assert torch.equal(x, y)
            assert y.requires_grad == (grad and x.requires_grad)
    one, *_, other = copies
    if grad:
        assert one.grad_fn is other.grad_fn
        loss = (one * 2).sum() + (other * 3).sum()
        loss.backward()
        assert first.grad is not None
        assert last.grad is not None
        assert first.grad.tolist() == [2, 2, 2]
        assert last.grad.tolist() == [3, 3]


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
    fence = StreamFence(SOURCE)
    tensors = (torch.rand(3), None, torch.rand(3, device="meta"))
    stream = streams.new(SOURCE)
    fence.leave()
    fence.hold(stream, tensors)
    fence.expect(stream)
    fence.arrive(tensors)
    of_memory = [entry for entry in streams.log if "memory" in entry]
    assert of_memory == ["memory is used by cpu:0 copies", "memory is used by cpu:0 compute"]


def test_a_recomputation_does_not_wait_for_its_gradient_where_only_a_skip_has_one(
    streams: Any,
) -> None:
    layers = nn.Sequential(
        Stash(nn.Linear(2, 2), lambda x: x.argmax(1)),
        nn.Identity(),
        Pop(lambda x, skip: skip * x.unsqueeze(1)),
    )
    devices = [SOURCE, SOURCE, TARGET]
    model = GPipe(layers, [1] * 3, devices=devices, checkpoint="always", engine="graph")

    def note(task: Task) -> AbstractContextManager[None]:
        streams.log.append(f"{task.kind} {task.partition}")
        return nullcontext()

    model.observer = note
    loss = model(torch.tensor([[0.0, 1.0], [0.0, 1.0]])).sum()
    streams.log.clear()
    loss.backward()
    events = ["recompute 0", "cpu:0 compute waits for cpu:0 copies", "backward 0"]
    assert [entry for entry in streams.log if entry in events] == events


@pytest.mark.parametrize("options", [{}, {"copy_streams": False}, {"dependency": False}])
def test_steps_are_those_of_plain_layers(
    streams: Any, checkpoint: str, options: dict[str, bool]
) -> None:
    """Check that a pipeline with skips on simulated devices trains as its layers do."""
    layers = partial(paired, PATTERN)
    row = Row("skips between devices", layers, balance=(2, 2, 3), use=steps, options=options)
    assert unlike(row, "", "graph", checkpoint, ["cpu:0", "cpu:1", "cpu:2"]) == []
    with_copy_streams = options.get("copy_streams", True)
    assert any("waits" in entry for entry in streams.log) == with_copy_streams
