"""Small layers for the models of tests, such as `Do`, a layer whose forward is a given function.

Inputs and outputs have the shape `(N, WIDTH)`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from .draw import dropout
from .wiring import with_skips

WIDTH = 4
Pair = namedtuple("Pair", "one other")


class Do(nn.Module):
    """A layer whose forward returns `function(self, input)`.

    The layer stores the keyword arguments: a `Parameter` as a parameter, any other tensor as a
    buffer, and any other value as an attribute.
    """

    def __init__(self, function: Callable[[Any, Any], Any], **holds: Any) -> None:
        super().__init__()
        self.function = function
        for name, x in holds.items():
            if isinstance(x, Tensor) and not isinstance(x, Parameter):
                self.register_buffer(name, x)
            else:
                setattr(self, name, x)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def layer(given: Any) -> nn.Module:
    """Wrap a function in a layer (`Do`). Return a module unchanged."""
    if isinstance(given, nn.Module):
        return given

    def call(_: Any, value: Any) -> Any:
        return given(*value) if isinstance(value, tuple) else given(value)

    return Do(call)


def made(*layers: Callable[[], Any]) -> Callable[[], nn.Sequential]:
    """Return a function that builds an `nn.Sequential`.

    Each argument is called without arguments to make one layer. If it returns a plain function of
    tensors instead of a module, this function is wrapped in a module.
    """
    return lambda: nn.Sequential(*(layer(make()) for make in layers))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen_linear() -> nn.Linear:
    return linear().requires_grad_(False)


def between_linears(make: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    return made(linear, make, linear)


def five(last: Callable[[], nn.Module] = linear) -> nn.Sequential:
    """Build the default model of test cases."""
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Sigmoid(), last())


def real(*, grad: bool = True) -> Tensor:
    """Return 8 samples of random real numbers, the default input of test cases.

    Split into three micro-batches, they give 3, 3 and 2 samples, so the last one is smaller.
    """
    return torch.randn(8, WIDTH).requires_grad_(grad)


def weight() -> Parameter:
    return Parameter(torch.rand(WIDTH))


def acting(act: Callable[[Any], object]) -> nn.Module:
    """Return a layer that calls `act(layer)` in each forward, and scales its input by a weight."""

    def run(self: Any, x: Tensor) -> Tensor:
        act(self)
        return x * self.weight

    return Do(run, weight=weight())


def norm(layer: nn.Module) -> nn.Module:
    """Wrap a norm layer so that it can train on a single sample.

    A norm such as `BatchNorm1d` needs several values in each channel. So the four features of a
    sample become two channels with two values each.
    """
    return nn.Sequential(nn.Unflatten(1, (2, 2)), layer, nn.Flatten())


def shared_parts() -> nn.ModuleList:
    """Make modules that layers can share."""
    return nn.ModuleList([linear(), norm(nn.BatchNorm1d(2))])


def freeze(build: Callable[[], nn.Sequential], *numbers: int) -> nn.Sequential:
    """Build layers, and freeze some of them."""
    layers = build()
    for number in numbers:
        layers[number].requires_grad_(False)
    return layers


def tied(to: nn.Linear) -> nn.Module:
    layer = linear()
    layer.weight = to.weight
    return layer


def _times_drawn(self: Any, x: Tensor) -> Tensor:
    return x * dropout(x, self.generator)


def draw_from(generator: torch.Generator | None = None) -> nn.Module:
    """Return a dropout layer that draws its random numbers from the given generator.

    If no generator is given, the layer makes one that no other layer uses.
    """
    own = generator or torch.Generator().manual_seed(3)
    return Do(_times_drawn, generator=own)


def _checkpointed(self: Any, x: Tensor) -> Any:
    # A reentrant checkpoint warns if its input does not require grad.
    if self.reentrant and not x.requires_grad:
        return self.inner(x)
    return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool) -> nn.Module:
    """Return a layer that uses `torch.utils.checkpoint`."""
    return Do(_checkpointed, inner=nn.Sequential(linear(), nn.Tanh()), reentrant=reentrant)


def _constant(_: Any, x: Tensor) -> Tensor:
    return torch.ones_like(x, requires_grad=False)


def _tanh_of_input(x: Tensor, _: Tensor) -> Tensor:
    return x.tanh()


def only_a_skip() -> nn.Sequential:
    """Build a model of three layers, in which gradients flow back through a skip only.

    The third layer has two inputs: the second layer's output, which is constant, and a skip, which
    requires grad.
    """
    stashing = with_skips(Do(_constant), {"skip": _tanh_of_input}, {})
    popping = with_skips(nn.Sigmoid(), {}, {"skip": torch.mul})
    return nn.Sequential(linear(), stashing, popping)
