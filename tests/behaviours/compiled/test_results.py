"""Tests that a pipeline of compiled layers computes what the layers compute without a pipeline.

The tests use `model(x)` and `model.step`, on every engine, in every mode of checkpointing.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from ...library.layers import compiled_around, compiled_in_place
from ...plain import Plain, piped
from ..compare import REORDERED, differences
from .made import CHUNKS, Counting, by_call, by_step

# torch.compile gives this warning with plain layers, too, because it reads all tensor attributes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.quick(2)
@pytest.mark.parametrize("train", [by_call, by_step])
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_compiled_layers(
    compiled: Callable[[nn.Module], nn.Module],
    train: Callable[[Any, Tensor, Tensor], None],
    engine: str,
    checkpoint: str,
) -> None:
    torch.compiler.reset()
    plain = nn.Sequential(Counting(), Counting(), Counting(), Counting())
    own = copy.deepcopy(plain)
    layers = nn.Sequential(*[compiled(layer) for layer in own])
    schedule = "1F1B" if train is by_step else "GPipe"
    model = piped(layers, [2, 2], CHUNKS, engine=engine, checkpoint=checkpoint, schedule=schedule)
    # Workers that compile a layer at the same time compile it more than once.
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            x, target = torch.randn(2, 8, 6)
            train(model, x, target)
            train(Plain(plain, chunks=CHUNKS), x, target)
    assert differences(own, plain, REORDERED) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_a_compiled_batch_norm(
    compiled: Callable[[nn.Module], nn.Module], engine: str, checkpoint: str
) -> None:
    """Check that a compiled batch norm has the running statistics of a plain batch norm.

    Compiled code updates running statistics also in a recomputation. So a recomputation has to run
    on copies of them.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()))
    plain = Plain(copy.deepcopy(layers), chunks=CHUNKS)
    layers[1] = compiled(layers[1])
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint=checkpoint)
    x = torch.randn(8, 6)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert differences(held(model), held(plain), REORDERED) == []


def held(model: nn.Module) -> dict[str, Any]:
    """Return gradients and buffers by name, without the prefix `_orig_mod` of compiled layers."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[f"gradient of {name}".replace("_orig_mod.", "")] = p.grad
    for name, x in model.named_buffers():
        found[name.replace("_orig_mod.", "")] = x
    return found
