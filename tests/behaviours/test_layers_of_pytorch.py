"""Tests of layers that use PyTorch features which a pipeline supports only in part.

They run with every schedule:

- A reentrant checkpoint and a frozen scripted layer must give the right results.
- A scripted layer with parameters must raise an error.
- Operators that call Python functions, such as `torch.cond`, must raise an error on worker threads.
- A backward of several gradients at once (`is_grads_batched`) must raise an error.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as checkpointed

from torchgpipe.schedules.named import NAMED

from ..plain import TWICE, piped
from .compare import REORDERED, differences, named
from .rows.tools.scripted import SCRIPTED, frozen, scripted

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


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        first = torch.zeros((), dtype=torch.long)
        _, y = while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y.sin()), (first, self.inner(x)))
        return y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        heads = x.detach()[None, None]  # on CPUs, `flex_attention` has no backward
        attended = flex_attention(heads, heads, heads, score_mod=far_counts_less)
        return self.inner(x + attended[0, 0])


def far_counts_less(
    score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    return score - (query - key).abs()


WITH_FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "cond": Conditional,
    "while_loop": Repeating,
    "flex_attention": Attending,
}
SEVERAL = r"is_grads_batched=True, jacobian\(vectorize=True\)"


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))


def pipeline(layers: nn.Sequential, schedule: str, engine: str, checkpoint: str = "never") -> Any:
    balance, v = ([1, 1, 1, 1], 2) if schedule in TWICE else ([2, 2], 1)
    options = {"engine": engine, "schedule": schedule, "checkpoint": checkpoint}
    return piped(layers, balance, 2, ("cpu", "cpu"), v, **options)


def assert_steps_as_plain_layers(
    layers: nn.Sequential, schedule: str, engine: str, checkpoint: str
) -> None:
    """Check that a step of a pipeline has the loss and the gradients of plain layers."""
    plain = copy.deepcopy(layers)
    model = pipeline(layers, schedule, engine, checkpoint)
    # `Everywhere` calls `autograd.grad`, for which reentrant checkpoints raise an error.
    if engine != "ranks":
        # Unlike `step`, `backward` checks that the layers have not changed since the forward.
        model(X).sum().backward()
        model.zero_grad()
    loss = model.step(mse_loss, X, X.square())
    expected = torch.zeros(())
    for x, target in zip(X.chunk(2), X.square().chunk(2), strict=True):
        part = mse_loss(plain(x), target) / 2
        part.backward()
        expected = expected + part.detach()
    assert differences((loss, layers), (expected, plain), REORDERED) == []


# This warning comes from a first forward pass, which runs without a graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`torch.jit.(script|freeze)` is deprecated")
@pytest.mark.quick(4)
@pytest.mark.parametrize("schedule", NAMED)
def test_layers_that_are_right(schedule: str, engine: str, checkpoint: str) -> None:
    for name, make in RIGHT.items():
        with named(name):
            assert_steps_as_plain_layers(around(make()), schedule, engine, checkpoint)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.quick(4)
@pytest.mark.parametrize("schedule", NAMED)
def test_a_scripted_layer_with_parameters_is_refused(
    schedule: str, engine: str, checkpoint: str
) -> None:
    model = pipeline(around(scripted()), schedule, engine, checkpoint)
    with pytest.raises(RuntimeError, match=SCRIPTED):
        model.step(mse_loss, X, X)


# These operators read the gradients of their inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", NAMED)
def test_operators_with_functions_are_refused_on_workers(
    schedule: str, engine: str, checkpoint: str
) -> None:
    for name, make in WITH_FUNCTIONS.items():
        with named(name):
            if engine == "workers":
                model = pipeline(around(make()), schedule, engine, checkpoint)
                refusal = rf"the operator '{name}.*use engine='graph'"
                with pytest.raises(RuntimeError, match=refusal):
                    model.step(mse_loss, X, X)
            else:
                assert_steps_as_plain_layers(around(make()), schedule, engine, checkpoint)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_gradients_in_one_call_are_refused(engine: str) -> None:
    for schedule in NAMED:
        with named(schedule):
            model = pipeline(around(nn.Tanh()), schedule, engine, "always")
            with pytest.raises(RuntimeError, match=SEVERAL):
                torch.autograd.functional.jacobian(model, X, vectorize=True)
