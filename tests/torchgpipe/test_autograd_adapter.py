"""The private names of PyTorch that `torchgpipe._autograd` uses: where they are, and what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe._autograd import accumulates, keeps_graph, run_backward


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (lambda: torch.autograd.Variable._execution_engine, "run_backward"),
        (lambda: torch.autograd.Variable._execution_engine, "is_checkpoint_valid"),
        (lambda: torch._C._autograd, "_get_current_graph_task_keep_graph"),
    ],
)
def test_the_name_is_still_there(holder: Any, name: str) -> None:
    assert hasattr(holder(), name), f"this PyTorch ({torch.__version__}) has moved {name}; see torchgpipe/_autograd.py"


def test_run_backward_accumulates_like_torch_autograd_backward() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for _ in range(2):
        product, total = x * y, x + y
        run_backward(
            [get_gradient_edge(product), get_gradient_edge(total)],
            [torch.full((3,), 2.0), torch.ones(3)],
            keep_graph=False,
        )
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, 2 * (2 * y + 1).detach())
    assert torch.equal(y.grad, 2 * (2 * x + 1).detach())


@pytest.mark.parametrize("keep", [True, False])
def test_run_backward_keeps_the_graph_if_asked(keep: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    edge = get_gradient_edge(x.exp())
    run_backward([edge], [torch.ones(3)], keep_graph=keep)
    if keep:
        run_backward([edge], [torch.ones(3)], keep_graph=False)
    else:
        with pytest.raises(RuntimeError, match="second time"):
            run_backward([edge], [torch.ones(3)], keep_graph=False)


class Ask(torch.autograd.Function):
    answers: tuple[bool, bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Ask.answers = (keeps_graph(), accumulates())
        return grads[0]


@pytest.mark.parametrize(
    ("backward", "keeps", "all_leaves"),
    [
        (lambda y, x: y.backward(), False, True),
        (lambda y, x: y.backward(retain_graph=True), True, True),
        (lambda y, x: torch.autograd.grad(y, x), False, False),
        (lambda y, x: y.backward(inputs=[x]), False, False),
    ],
    ids=["backward", "retain_graph", "grad", "inputs"],
)
def test_what_a_backward_says_of_itself(backward: Any, keeps: bool, all_leaves: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    backward(Ask.apply(x).sum(), x)
    assert Ask.answers == (keeps, all_leaves)
