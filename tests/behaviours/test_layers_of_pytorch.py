"""Layers with PyTorch tools that a pipeline supports only in part, with every schedule.

A reentrant checkpoint is right everywhere. Operators that run functions of their own need the graph
engine. Several gradients cannot be computed in one call.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as checkpointed

from torchgpipe import GPipe
from torchgpipe.schedules.named import NAMED

from .compare import REORDERED, differences
from .test_rows import TWICE

X = torch.linspace(-1, 1, 32).view(8, 4)
ENGINES = ("graph", "workers")


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpointed(self.inner, x, use_reentrant=True)


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


def piped(layer: nn.Module, schedule: str, engine: Any, checkpoint: Any = "never") -> GPipe:
    layers = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))
    balance = [1, 1, 1, 1] if schedule in TWICE else [2, 2]
    options: dict[str, Any] = {"engine": engine, "schedule": schedule, "checkpoint": checkpoint}
    return GPipe(layers, balance, devices=["cpu", "cpu"], chunks=2, **options)


# This warning comes from a first forward pass, which runs without a graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", NAMED)
def test_a_reentrant_checkpoint(schedule: str, engine: str, mode: str) -> None:
    model = piped(Reentrant(), schedule, engine, mode)
    plain = copy.deepcopy(model[:])
    loss = model.step(mse_loss, X, X.square())
    expected = torch.zeros(())
    for x, target in zip(X.chunk(2), X.square().chunk(2), strict=True):
        part = mse_loss(plain(x), target) / 2
        part.backward()
        expected = expected + part.detach()
    assert differences((loss, model[:]), (expected, plain), REORDERED) == []


# `torch.cond` reads the gradients of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("schedule", NAMED)
def test_operators_with_functions_need_the_graph_engine(schedule: str) -> None:
    model = piped(Conditional(), schedule, "workers")
    with pytest.raises(RuntimeError, match=r"the operator 'cond'.*use engine='graph'"):
        model.step(mse_loss, X, X)
    model = piped(Conditional(), schedule, "graph")
    plain = copy.deepcopy(model[:])
    outputs = torch.cat([plain(x) for x in X.chunk(2)])
    loss = model.step(mse_loss, X, X)
    torch.testing.assert_close(loss, mse_loss(outputs, X).detach())


@pytest.mark.parametrize("engine", ENGINES)
def test_several_gradients_in_one_call_are_refused(engine: str) -> None:
    model = piped(nn.Tanh(), "1F1B", engine, "always")
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True, jacobian\(vectorize=True\)"):
        torch.autograd.functional.jacobian(model, X, vectorize=True)
