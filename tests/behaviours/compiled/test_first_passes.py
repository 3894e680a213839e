"""Tests of the first passes of compiled layers: which of them make a graph, and what they draw."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from torchgpipe.layers.compiled import compile_layer

from ...plain import Plain, piped
from ..compare import REORDERED, differences
from .made import CHUNKS, Counted, OtherMaskWithoutGraph, by_call

# torch.compile gives this warning with plain layers, too, because it reads all tensor attributes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.quick(2)
def test_first_passes_of_compiled_layers_make_no_graph(engine: str) -> None:
    torch.compiler.reset()
    backend = OtherMaskWithoutGraph()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint="always")
    model.compile(backend=backend)
    of_other_size = torch.randn(12, 6)
    for x in (torch.randn(8, 6), of_other_size):
        model(x).sum().backward()
    # Each process of a pipeline over ranks has one of the two layers.
    here = 1 if engine == "ranks" else 2
    assert backend.with_graph.count(False) == here


@pytest.mark.quick(2)
def test_layers_that_are_compiled_again_may_run_without_a_graph_again(engine: str) -> None:
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint="always")
    here = 1 if engine == "ranks" else 2
    for of_weights in (True, False):
        backend = OtherMaskWithoutGraph()
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(("weight" in name) == of_weights)
        model.compile(backend=backend)
        model(torch.rand(8, 6)).sum().backward()
        assert backend.with_graph.count(False) == here


class Chooses(nn.Module):
    """A layer that multiplies by another factor if a tensor in it does not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 3 if y.requires_grad else y * 4


@pytest.mark.quick(2)
def test_a_layer_that_is_not_compiled_may_ask_what_requires_grad(engine: str) -> None:
    torch.compiler.reset()
    own = nn.Sequential(nn.Linear(6, 6), Chooses(), nn.Linear(6, 6))
    plain = copy.deepcopy(own)
    compile_layer(own[0], backend=Counted())
    compile_layer(own[2], backend=Counted())
    model = piped(own, [2, 1], CHUNKS, engine=engine, checkpoint="always")
    for _ in range(2):
        x, target = torch.randn(2, 8, 6)
        by_call(model, x, target)
        by_call(Plain(plain, chunks=CHUNKS), x, target)
    assert differences(own, plain, REORDERED) == []


class Scaled(nn.Module):
    """A layer that multiplies its input by a weight, and drops half of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 1)
        self.drops = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return dropout(y) if self.drops else y


def scaled(engine: str, *, drops: bool) -> tuple[Any, Scaled, Scaled]:
    """Return a pipeline, and its two layers, which draw random numbers if `drops` is true."""
    torch.compiler.reset()
    first, second = Scaled(), Scaled()
    first.drops = second.drops = drops
    model = piped(nn.Sequential(first, second), [1, 1], CHUNKS, engine=engine, checkpoint="always")
    return model, first, second


def check_masks(model: Any, layers: list[Scaled], size: int = 8) -> None:
    """Check that gradients of layers `Scaled` belong to the masks that the output shows."""
    model.zero_grad()
    y = model(torch.ones(size, 6))
    y.sum().backward()
    for layer in layers:
        assert layer.weight.grad is not None
        # The sum is linear in each weight.
        torch.testing.assert_close((layer.weight.grad * layer.weight).sum(), y.sum())


@pytest.mark.quick(2)
def test_first_passes_of_compiled_layers_that_draw_make_a_graph(engine: str) -> None:
    """Check that a dropout mask is the same in forward and backward, whatever the compiler does."""
    model, *layers = scaled(engine, drops=True)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)


@pytest.mark.quick(2)
def test_compiled_layers_that_draw_later(engine: str) -> None:
    """Check that there is an error if compiled layers first draw in a pass without a graph.

    After the error, the next mini-batch gets the right gradients.
    """
    model, *layers = scaled(engine, drops=False)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)
    layers[1].drops = True
    with pytest.raises(RuntimeError, match="compiled layers of this stage drew random numbers"):
        model(torch.ones(8, 6))
    check_masks(model, layers)


@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_each_stage_refuses_to_draw_later_only_once(engine: str) -> None:
    model, *layers = scaled(engine, drops=False)
    model.compile(backend=OtherMaskWithoutGraph())
    x = torch.ones(8, 6)
    model(x)
    for layer in layers:
        layer.drops = True
    for _ in layers:
        with pytest.raises(RuntimeError, match="which each stage asks for at most once"):
            model(x)
    model(x)
    model(x.requires_grad_())
    model.eval()
    model(x)


@pytest.mark.quick(2)
def test_compiled_layers_that_draw_for_other_sizes_first(engine: str) -> None:
    model, *layers = scaled(engine, drops=False)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)
    layers[1].drops = True
    check_masks(model, layers, size=12)
    check_masks(model, layers)


@pytest.mark.quick(2)
def test_layers_that_draw_and_are_compiled_later(engine: str) -> None:
    model, *layers = scaled(engine, drops=True)
    check_masks(model, layers)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)


@pytest.mark.parametrize("inner_engine", ["graph", "workers"])
def test_a_compiled_pipeline_that_draws_within_a_pipeline(inner_engine: str) -> None:
    inner, *layers = scaled(inner_engine, drops=True)
    inner.compile(backend=OtherMaskWithoutGraph())
    layers.append(Scaled())
    outer = nn.Sequential(inner, layers[-1])
    model = piped(outer, [1, 1], 2, engine="workers", checkpoint="never")
    for _ in range(2):
        check_masks(model, layers)
