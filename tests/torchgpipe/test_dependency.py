"""Fork and join: an order of backward that autograd would not have chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe.dependency import differentiable, fork, join


class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: list[int], name: int, x: Tensor) -> Tensor:
        ctx.log, ctx.name = log, name
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        ctx.log.append(ctx.name)
        return None, None, grads[0]


def in_new_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def order_of_backward(tasks: int, *, dependency: bool) -> list[int]:
    """Build tasks in turn, such that autograd by itself takes the first one first.

    Of the nodes that are ready autograd takes the one with the highest sequence number, and numbers are counted by
    thread. So each task is built in a thread that has made fewer nodes than that of the task before.
    """
    log: list[int] = []
    x = torch.ones(1, requires_grad=True)
    outputs: list[Tensor] = []
    phonies: list[Tensor] = []

    def build(i: int) -> None:
        for _ in range(50 * (tasks - i)):
            x.clone()
        y = x
        if dependency and phonies:
            y = join(y, phonies[-1])
        y = Log.apply(log, i, y)
        if dependency:
            y, phony = fork(y)
            phonies.append(phony)
        outputs.append(y)

    for i in range(tasks):
        in_new_thread(lambda i=i: build(i))  # type: ignore[misc]
    torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]

    assert x.grad is not None
    assert x.grad.item() == tasks
    return log


@pytest.mark.parametrize("tasks", [2, 3, 6])
def test_order_of_backward(tasks: int) -> None:
    ascending = list(range(tasks))

    assert order_of_backward(tasks, dependency=False) == ascending
    assert order_of_backward(tasks, dependency=True) == ascending[::-1]


def test_fork_and_join_change_no_value() -> None:
    x = torch.rand(3, requires_grad=True)
    z = torch.rand(3, requires_grad=True)

    y, phony = fork(x)
    tied = join(z, phony)
    (2 * y + 3 * tied).sum().backward()

    assert torch.equal(y, x)
    assert torch.equal(tied, z)
    assert phony.numel() == 0
    assert x.grad is not None
    assert z.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert z.grad.tolist() == [3, 3, 3]


def test_the_phony_is_on_the_cpu() -> None:
    y, phony = fork(torch.rand(3, device="meta", requires_grad=True))

    assert (y.device.type, phony.device.type) == ("meta", "cpu")


def test_a_branch_without_gradient_lets_the_other_pass() -> None:
    x = torch.rand(3, requires_grad=True)
    z = torch.rand(3, requires_grad=True)

    y, phony = fork(x)
    join(z, phony)
    y.sum().backward()

    assert x.grad is not None
    assert z.grad is None


def test_only_the_order_is_wanted() -> None:
    """A gradient for the joined tensor alone reaches the forked one as none at all."""
    x = torch.rand(3, requires_grad=True)
    z = torch.rand(3, requires_grad=True)

    _, phony = fork(x)
    join(z, phony).sum().backward()  # type: ignore[no-untyped-call]

    assert x.grad is None
    assert z.grad is not None


# Tensors with nothing to order.
UNORDERED = {
    "takes no gradient": torch.rand(3),
    "integer": torch.arange(3),
    "boolean": torch.tensor([True]),
}


@pytest.mark.parametrize("x", UNORDERED.values(), ids=UNORDERED.keys())
def test_fork_where_there_is_nothing_to_order(x: Tensor) -> None:
    y, phony = fork(x)

    assert y is x
    assert phony.numel() == 0
    assert not phony.requires_grad


def test_fork_without_grad_mode() -> None:
    x = torch.rand(3, requires_grad=True)
    with torch.no_grad():
        y, phony = fork(x)

    assert y is x
    assert not phony.requires_grad


@pytest.mark.parametrize("x", UNORDERED.values(), ids=UNORDERED.keys())
def test_join_with_a_phony_that_takes_no_gradient(x: Tensor) -> None:
    assert join(x, torch.empty(0)) is x


def test_join_without_grad_mode() -> None:
    _, phony = fork(torch.rand(3, requires_grad=True))
    x = torch.rand(3, requires_grad=True)
    with torch.no_grad():
        assert join(x, phony) is x


def test_join_makes_a_tensor_part_of_the_graph() -> None:
    _, phony = fork(torch.rand(3, requires_grad=True))

    assert join(torch.rand(3), phony).requires_grad


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.uint8, torch.bool])
def test_join_refuses_what_takes_no_gradient(dtype: torch.dtype) -> None:
    _, phony = fork(torch.rand(3, requires_grad=True))
    with pytest.raises(TypeError, match=f"join needs a floating-point tensor, but got one of {dtype}"):
        join(torch.zeros(3, dtype=dtype), phony)


DIFFERENTIABLE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", [*DIFFERENTIABLE, torch.long, torch.uint8, torch.bool], ids=str)
def test_differentiable(dtype: torch.dtype) -> None:
    assert differentiable(torch.zeros(1, dtype=dtype)) == (dtype in DIFFERENTIABLE)
