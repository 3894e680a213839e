"""Layers with PyTorch tools that a pipeline supports only in part, with every schedule.

A reentrant checkpoint and a frozen scripted layer are right everywhere. A scripted layer with
parameters is refused. Operators that run functions of their own need the graph engine. Several
gradients cannot be computed in one call.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as checkpointed

from torchgpipe import GPipe
from torchgpipe.schedules.named import NAMED

from .compare import REORDERED, differences
from .rows.tools.scripted import SCRIPTED, frozen, scripted
from .test_rows import TWICE

X = torch.linspace(-1, 1, 32).view(8, 4)
ENGINES = ("graph", "workers")


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpointed(self.inner, x, use_reentrant=True)


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a reentrant checkpoint": Reentrant,
    "a frozen scripted layer": frozen,
}


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
@pytest.mark.filterwarnings("ignore:`torch.jit.(script|freeze)` is deprecated")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", NAMED)
def test_layers_that_are_right(schedule: str, engine: str, mode: str, name: str) -> None:
    model = piped(RIGHT[name](), schedule, engine, mode)
    plain = copy.deepcopy(model[:])
    # Unlike a step, this backward checks that the layers have not changed since the forward.
    model(X).sum().backward()
    model.zero_grad()
    loss = model.step(mse_loss, X, X.square())
    expected = torch.zeros(())
    for x, target in zip(X.chunk(2), X.square().chunk(2), strict=True):
        part = mse_loss(plain(x), target) / 2
        part.backward()
        expected = expected + part.detach()
    assert differences((loss, model[:]), (expected, plain), REORDERED) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", NAMED)
def test_a_scripted_layer_with_parameters_is_refused(schedule: str, engine: str, mode: str) -> None:
    model = piped(scripted(), schedule, engine, mode)
    with pytest.raises(RuntimeError, match=SCRIPTED):
        model.step(mse_loss, X, X)


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
