"""A pipeline of compiled layers computes what these layers compute.

This is tested for `model(x)` and for `model.step`, on every engine, in every mode of checkpointing.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..library.layers import compiled_around, compiled_in_place
from ..plain import Plain, piped
from .compare import REORDERED, differences

# torch.compile gives this warning with plain layers, too, because it reads all tensor attributes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CHUNKS = 4
NORM = "running statistics of a batch norm in training"


class Counting(nn.Module):
    """A layer whose output depends on a buffer, which it changes, and on its training mode."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x) + self.count
        return y.tanh() if self.training else y


def by_call(run: Any, x: Tensor, target: Tensor) -> None:
    loss = mse_loss(run(x), target)
    run.eval()  # a recomputation still runs in training mode
    loss.backward()
    run.train()


def by_step(run: Any, x: Tensor, target: Tensor) -> None:
    if isinstance(run, Plain):
        mse_loss(run(x), target).backward()
    else:
        run.step(mse_loss, x, target)


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


@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_a_compiled_batch_norm_is_right_or_refused(
    compiled: Callable[[nn.Module], nn.Module], engine: str, checkpoint: str
) -> None:
    """Recomputing a compiled batch norm gives right results, or raises an error.

    Older versions of PyTorch give right results. In newer versions, compiled code reads the running
    statistics in a recomputation. A pipeline does not allow that, and raises an error.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()))
    plain = Plain(copy.deepcopy(layers), chunks=CHUNKS)
    layers[1] = compiled(layers[1])
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint=checkpoint)
    x = torch.randn(8, 6)
    loss = model(x).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert re.search(NORM, str(error))
    else:
        plain(x).sum().backward()
        assert differences(held(model), held(plain), REORDERED) == []


def held(model: nn.Module) -> dict[str, Any]:
    """Return gradients and buffers by name, without the prefixes of compiled layers."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[f"gradient of {name}".replace("_orig_mod.", "")] = p.grad
    for name, x in model.named_buffers():
        found[name.replace("_orig_mod.", "")] = x
    return found
