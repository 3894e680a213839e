"""The first layer can take a mapping or a dataclass; each micro-batch gets its part of the tensors.

Losses and gradients are those of plain layers that run on one micro-batch after another.
"""

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import MicroBatches

from ..plain import piped
from .compare import REORDERED, differences


@dataclass
class Pair:
    x: Tensor
    scale: Tensor
    name: str


class First(nn.Module):
    """A layer whose input is a mapping or a `Pair`, not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, given: Any) -> Tensor:
        values = given if isinstance(given, Mapping) else vars(given)
        assert values["name"] == "a batch"
        return self.linear(values["x"]) * values["scale"][:, None]


class OwnDict(UserDict[str, Any]):
    """A mapping like a tokenizer's `BatchEncoding`."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(First(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def tensors(seed: int, size: int = 8) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw)
    return {"x": x, "scale": torch.rand(size, generator=draw), "name": "a batch"}


def parts(values: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
    split = zip(values["x"].chunk(chunks), values["scale"].chunk(chunks), strict=True)
    return [{"x": x, "scale": scale, "name": "a batch"} for x, scale in split]


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "UserDict": OwnDict,
    "dataclass": lambda values: Pair(**values),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_step_and_call(kind: Callable[[dict[str, Any]], Any], engine: str, checkpoint: str) -> None:
    options = {"engine": engine, "checkpoint": checkpoint, "devices": ("cpu", "cpu")}
    model = piped(layers(), [2, 2], chunks=4, **options)
    plain, target = layers(), torch.ones(8, 3)
    values = tensors(1)
    total = torch.zeros(())
    for given, t in zip(parts(values, 4), target.chunk(4), strict=True):
        loss = mse_loss(plain(kind(given)), t) / 4
        loss.backward()
        total = total + loss.detach()
    found = model.step(mse_loss, kind(values), target)
    assert differences((found, model), (total, plain), REORDERED) == []
    with torch.no_grad():
        output = model(kind(values))
        if output is not None:
            expected = torch.cat([plain(kind(given)) for given in parts(values, 4)])
            assert differences(output, expected, REORDERED) == []


def test_micro_batches(engine: str) -> None:
    model = piped(layers(), [2, 2], chunks=1, engine=engine, devices=("cpu", "cpu"))
    plain = layers()
    given = [tensors(1, 2), tensors(2, 3)]
    target = MicroBatches([torch.ones(2, 3), torch.ones(3, 3)])
    total = torch.zeros(())
    for x, t in zip(given, target, strict=True):
        loss = mse_loss(plain(x), t) * len(t) / 5
        loss.backward()
        total = total + loss.detach()
    found = model.step(mse_loss, MicroBatches(given), target)
    assert differences((found, model), (total, plain), REORDERED) == []


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "a batch"}, "input must have tensors, but got dict without any"),
        ({"x": torch.ones(8, 4), "scale": torch.ones(7)}, "must have the same batch size"),
        ([torch.ones(8, 4)], "input must be a tensor or a tuple of tensors, but got list"),
    ],
)
def test_refusals(given: Any, message: str) -> None:
    model = piped(layers(), [2, 2], chunks=4, engine="graph", devices=("cpu", "cpu"))
    with pytest.raises((TypeError, ValueError), match=message):
        model.step(mse_loss, given, torch.ones(8, 3))
