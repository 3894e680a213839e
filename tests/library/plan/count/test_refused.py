"""What cannot be counted, or not for any size, is named with its input and what to do, in one line."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.plan.count.count import count

from ...layers import Lambda


def broken(x: Tensor) -> Tensor:
    raise KeyError


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("no way back")


def compiled() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.compile()
    return layer


class CompiledForward(nn.Module):
    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


FAILS = r"^layer 1 \('odd', {}\) fails on \(2, 8\) float32: .*{}.*; check the sample's .* no values"
COMPILED = r"layer 'odd' is compiled by torch\.compile"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.Linear(9, 4), FAILS.format("Linear", "9")),
        (lambda: Lambda(lambda x: x.view(7, -1)), FAILS.format("Lambda", "shape '.*' is invalid")),
        (lambda: Lambda(lambda x: x * x.sum().item()), FAILS.format("Lambda", "")),
        (lambda: Lambda(lambda x: x if x.sum() > 0 else -x), FAILS.format("Lambda", "")),
        (lambda: Lambda(lambda x: x[x > 0]), FAILS.format("Lambda", "")),
        (lambda: Lambda(broken), FAILS.format("Lambda", "KeyError")),
        (lambda: Lambda(NoWayBack.apply), FAILS.format("Lambda", "no way back")),
        (lambda: torch.compile(nn.Linear(8, 4)), COMPILED),
        (compiled, COMPILED),
        (lambda: nn.Sequential(compiled()), COMPILED),
        (CompiledForward, COMPILED),
        (lambda: Lambda(lambda x: x + 1 if len(x) == 2 else x * 2 + 1), "layer 'odd' runs different operators"),
    ],
)
def test_refused(layer: Callable[[], nn.Module], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.add_module("odd", layer())
    with pytest.raises(ValueError, match=message) as raised:
        count(model, torch.empty(3, 4))
    assert "\n" not in str(raised.value) and (raised.value.__cause__ is not None) == ("fails" in message)
    freed = weakref.ref(model)
    del model, raised
    assert freed() is None or message == COMPILED, "what the error's frames hold waits for the garbage collector"


def mix() -> nn.Module:
    """Attend from every sample to every other."""
    return Lambda(lambda x: torch.softmax(x @ x.T, dim=1) @ x)


def distances() -> nn.Module:
    return Lambda(lambda x: x * (x[:, None] - x[None]).abs().sum(1))


@pytest.mark.parametrize(
    ("layers", "shape", "named"),
    [
        ([nn.Linear(8, 8), mix()], (1, 8), "'1':"),
        ([nn.Linear(8, 8), distances()], (1, 8), "'1':"),
        ([nn.Linear(8, 8), mix(), nn.Tanh(), distances()], (1, 8), "'1' and 1 more:"),
        ([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], (1, 5, 8), None),
        ([nn.Embedding(10, 8), nn.Linear(8, 8), nn.Dropout()], (1, 5), None),
        ([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)], (1, 3, 9, 9), None),
        ([nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GroupNorm(4, 64)], (1, 64), None),
    ],
)
def test_warns_of_layers_that_cost_more_with_every_sample(layers: Sequence[Any], shape: Any, named: str | None) -> None:
    sample = torch.zeros(shape, dtype=torch.long if isinstance(layers[0], nn.Embedding) else torch.float)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        count(nn.Sequential(*layers), sample)
    messages = [str(each.message) for each in warned]
    assert "\n" not in "".join(messages) and all(each.filename == __file__ for each in warned)
    begins = f"layer {named} every further sample costs more"
    assert [message[: len(begins)] for message in messages] == ([begins] if named else [])
