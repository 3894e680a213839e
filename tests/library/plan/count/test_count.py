"""Counts against what is known by hand, and the line through two sizes against counting at a third."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from reproduce.models import amoebanetd, resnet101, unet
from torchgpipe import GPipe
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.counter import Counter


def test_layers_of_unet() -> None:
    model = unet(2, 1, 4)
    counts = count(model, torch.empty(1, 3, 16, 16))
    layers = counts.at(3)
    assert [layer.name for layer in layers] == list(model._modules)
    assert [layer.parameters for layer in layers] == [sum(p.nbytes for p in layer.parameters()) for layer in model]
    assert sorted(s.skip for layer in layers for s in layer.stashes) == [0, 1]
    assert sorted(skip for layer in layers for skip in layer.pops) == [0, 1]
    assert counts.input == 3 * 16 * 16 * 4
    assert layers[0].output == 3 * 4 * 16 * 16 * 4


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_line_through_two_sizes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    x = torch.empty(1, 3, 8, 8)
    line = count(model, x).at(size)
    monkeypatch.setattr("torchgpipe.plan.count.count.SIZES", (size, size + 1))
    assert line == count(model, x).at(size)


class Residual(nn.Module):
    """Pass a pair on: one side through a layer, the other unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        a, b = x if isinstance(x, tuple) else (x, x)
        return self.layer(a), b


class Sum(nn.Module):
    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x[0] + x[1]


def pairs() -> nn.Sequential:
    cells = [layer for _ in range(3) for layer in (Residual(nn.Linear(8, 8)), Residual(nn.ReLU()), Sum())]
    return nn.Sequential(nn.Linear(8, 8), *cells, nn.Identity(), nn.Flatten())


def checkpointed() -> nn.Sequential:
    class Again(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    return nn.Sequential(nn.Linear(8, 8), Again(8, 8), nn.ReLU())


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("build", "shape", "more"),
    [
        (resnet101, (3, 64, 64), 0),
        (lambda: unet(3, 2, 8), (3, 32, 32), 0),
        # A layer is counted as if all that it puts out were used, and the classifier does not use the second state.
        (lambda: amoebanetd(3, 32, 10), (3, 224, 224), 1),
        (pairs, (8,), 0),
        (checkpointed, (8,), 0),
        (in_place, (8,), 0),
    ],
    ids=["ResNet-101", "U-Net", "AmoebaNet-D", "pairs", "checkpointed", "in place"],
)
def test_counted_layer_by_layer_as_in_a_step_of_gpipe(
    build: Callable[[], nn.Sequential], shape: tuple[int, ...], more: int
) -> None:
    """In backward the order may differ: autograd adds the gradients of a tensor that is used twice when it likes."""
    with torch.device("meta"):
        model, x = build(), torch.empty(2, *shape)
    layers = count(model, x, memory=False).at(2)
    gpipe = GPipe(model, [len(model)], devices=["meta"], checkpoint="never")
    with Counter() as forward:
        output = gpipe(x)
    gradient = torch.empty_like(output)
    with Counter() as backward:
        output.backward(gradient)
    assert [x for layer in layers for x in layer.forward] == forward.operators
    counted, real = Tally(x for layer in layers for x in layer.backward), Tally(backward.operators)
    assert not real - counted
    assert (counted - real).total() == more


class Copied(nn.Linear):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        Copied.copies += 1
        return Copied(self.in_features, self.out_features, device=self.weight.device)


@pytest.mark.parametrize(("widths", "different"), [([8] * 41, 1), ([8, 4] * 20 + [8], 2)])
def test_layers_that_behave_alike_are_copied_once(
    widths: list[int], different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copied, "copies", 0)
    model = nn.Sequential(*(Copied(a, b) for a, b in pairwise(widths)))
    assert len(count(model, torch.empty(1, 8), memory=False)) == 40
    assert Copied.copies == 2 * (different + 1)  # for two sizes; to the model's input goes no gradient


def test_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert isinstance(count(model, torch.rand(4, 3)), Counts)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def compiled_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.compile()
    return layer


class CompiledForward(nn.Module):
    @torch.compile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize(
    "layer",
    [torch.compile(nn.Linear(4, 4)), compiled_layer(), nn.Sequential(compiled_layer()), CompiledForward()],
    ids=["wrapped", "in place", "within", "forward"],
)
def test_refuses_what_is_compiled(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '1' is compiled by torch\.compile"):
        count(nn.Sequential(nn.ReLU(), layer), torch.empty(2, 4))
