"""Counts against what is known by hand, and the line through two sizes against counting at a third."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

import pytest
import torch
from torch import nn

from reproduce.models import amoebanetd, resnet101, unet
from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.counter import Counter

from ....behaviours.parts.layers import KINDS


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


def of(*kinds: str) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Linear(4, 4), *(KINDS[kind](None) for kind in kinds), nn.Flatten(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "shape", "more"),
    [
        (resnet101, (3, 64, 64), 0),
        (lambda: unet(3, 2, 8), (3, 32, 32), 0),
        # A layer is counted as if all that it puts out were used, and the classifier does not use the second state.
        (lambda: amoebanetd(3, 32, 10), (3, 224, 224), 1),
        (of("and its input", "swap", "sum", "and a view", "sum", "identity"), (4,), 0),
        (of("checkpointed, reentrant"), (4,), 0),
        (of("relu in place"), (4,), 0),
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
