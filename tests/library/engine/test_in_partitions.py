"""Test that a backward raises an error only when no other thread still runs a partition.

On several GPUs, autograd has one thread for each GPU. These tests use two threads, which call the
nodes of a graph on simulated streams, in an order that each test chooses.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.engine import in_partitions
from torchgpipe.engine.in_partitions import InPartitions

from ..ledger import assert_eventually

PATIENCE = 30.0


class Custom(Exception):
    """An error that cannot be copied: its class takes two arguments, but `args` has only one."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


class Waits(nn.Module):
    """A layer whose backward does not end before the test tells it to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.begun = threading.Event()
        self.goes_on = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(self.wait)
        return y

    def wait(self, grad: Tensor) -> None:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE)


class Raises(nn.Module):
    """A layer whose backward raises an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(self.fail)
        return y

    def fail(self, grad: Tensor) -> None:
        raise self.error


def nodes(y: Tensor) -> dict[tuple[int, int], Any]:
    """Return the autograd node of each task in the graph of `y`, by (micro-batch, stage)."""
    found = {}
    unseen: list[Any] = [y.grad_fn]
    while unseen:
        node = unseen.pop()
        if hasattr(node, "task") and "TaskNode" in node.name():
            found[node.task.i, node.task.stage.index] = node
        unseen += [following for following, _ in node.next_functions if following is not None]
    return found


@pytest.mark.parametrize("error", [ValueError("on purpose"), Custom(1, "on purpose")])
def test_an_error_waits_for_other_threads_and_no_thread_begins_another_task(
    error: Exception, streams: Any
) -> None:
    first = Waits()
    layers = nn.Sequential(first, Raises(error))
    model = GPipe(
        layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2, checkpoint="never", engine="graph"
    )
    by_task = nodes(model(torch.ones(2, 1)))
    parameter = first.weight

    def backward(i: int, j: int) -> Any:
        with torch.no_grad():
            return by_task[i, j].apply(torch.ones(1, 1), None)

    with ThreadPoolExecutor(2) as pool:
        within = pool.submit(backward, 1, 0)
        assert first.begun.wait(PATIENCE)
        assert first.weight is not parameter, "a stand-in is in its place"
        failing = pool.submit(backward, 0, 1)
        inside = by_task[0, 1].task.inside
        assert_eventually(lambda: inside._failed is not None, lambda: "it has not failed")
        with pytest.raises(TimeoutError):
            failing.result(0.05)  # the thread waits, however long this is
        first.goes_on.set()
        within.result(PATIENCE)
        with pytest.raises(type(error), match="on purpose") as caught:
            failing.result(PATIENCE)
        assert caught.value is error
    assert first.weight is parameter
    text = "on purpose" if isinstance(error, ValueError) else "Custom: 1: on purpose"
    with pytest.raises((ValueError, RuntimeError), match=text) as late:
        backward(0, 0)
    assert late.value is not error, "another error keeps no frames of the first one alive"


def test_two_threads_that_fail_do_not_wait_for_each_other() -> None:
    inside = InPartitions()
    both = threading.Barrier(2, timeout=PATIENCE)

    def fail(number: int) -> None:
        with inside:
            both.wait()
            raise ValueError(number)

    with ThreadPoolExecutor(2) as pool:
        futures: list[Future[None]] = [pool.submit(fail, number) for number in range(2)]
    assert [str(future.exception()) for future in futures] == ["0", "1"]


def test_the_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a failed thread waits only for a limited time for threads in other partitions.

    Without a limit, two threads that fail could wait for each other for ever.
    """
    monkeypatch.setattr(in_partitions, "WAIT_SECONDS", 0.01)
    inside = InPartitions()
    goes_on = threading.Event()
    begun = threading.Event()

    def stay() -> None:
        with inside:
            begun.set()
            assert goes_on.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(stay)
        assert begun.wait(PATIENCE)
        with pytest.raises(ValueError, match="on purpose"), inside:
            raise ValueError("on purpose")
        assert not staying.done()
        goes_on.set()


def test_a_later_backward_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 1
    monkeypatch.setattr(in_partitions, "backward_id", lambda: number)
    inside = InPartitions()
    with pytest.raises(ValueError, match="on purpose"), inside:
        raise ValueError("on purpose")
    with pytest.raises(ValueError, match="on purpose"), inside:
        pytest.fail("it is not entered")
    number = 2
    with inside:
        pass
