"""Tests that a compiled stage runs without a graph in one of its modes only, which comes first.

`torch.compile` would compile the layers once more for each further mode.
"""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from torchgpipe import GPipe

from ...behaviours.test_compiled import Counted, OtherMaskWithoutGraph, scaled
from ...plain import Plain

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def pipeline(engine: Any) -> tuple[GPipe, nn.Sequential]:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    options: dict[str, Any] = {"engine": engine, "checkpoint": "always"}
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=4, **options), layers


def train_in_phases(run: Any, layers: nn.Sequential) -> None:
    """Train all parameters, then only biases, then only weights, and then all again."""
    for of_weights, of_biases in ((True, True), (False, True), (True, False), (True, True)):
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(of_weights if "weight" in name else of_biases)
        run(torch.rand(8, 6)).sum().backward()


def test_frozen_parameters_add_no_compilations() -> None:
    """Check the number of compilations with the graph engine.

    In worker threads of a process that has run for long, PyTorch has once compiled layers anew for
    each call. The reason is not known.
    """
    torch.compiler.reset()
    model, layers = pipeline("graph")
    ours, theirs = Counted(), Counted()
    model.compile(backend=ours)
    train_in_phases(model, layers)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in plain:
        layer.compile(backend=theirs)
    train_in_phases(Plain(plain, chunks=4), plain)
    assert ours.count == theirs.count + len(plain), "one for first passes of each layer"


def test_layers_that_are_compiled_again_may_run_without_a_graph_again(engine: str) -> None:
    torch.compiler.reset()
    model, layers = pipeline(engine)
    layers[0].bias.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    for frozen in (False, True):
        backend = OtherMaskWithoutGraph()
        for layer in layers:
            layer.weight.requires_grad_(not frozen)
            layer.bias.requires_grad_(frozen)
        model.compile(backend=backend)
        model(torch.rand(8, 6)).sum().backward()
        assert backend.with_graph.count(False) == 2


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
