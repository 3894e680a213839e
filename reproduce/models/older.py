"""Build the models of torchgpipe's older tables, which its tables of today superseded: for predictions only.

Before 0.0.5 a flat model had no skips: its layers handed on tuples, with all that a later layer needs. ResNet-101 of
0.0.2 lacks two ReLUs of each bottleneck. AmoebaNet-D had another genotype, a convolution after every pooling, and was
cut finer: each operation of a cell is a layer.

Source: kakaobrain/torchgpipe, `examples` at v0.0.2 and v0.0.3.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import torch
from torch import Tensor, nn

from reproduce.models.amoebanet import OPERATIONS, Classifier, fit_older_state, relu_conv_bn
from reproduce.models.resnet import resnet101

States = tuple[Tensor, ...]

# The steps of a cell, two to a pair: the state that each reads, and its operation.
NORMAL = ((0, "avg pool 3x3"), (0, "conv 1x1"), (2, "none"), (2, "avg pool 3x3"), (0, "none"), (1, "conv 1x7-7x1"),
          (1, "conv 1x1"), (1, "conv 1x7-7x1"), (0, "avg pool 3x3"), (3, "conv 1x1"))  # fmt: skip
REDUCTION = ((1, "max pool 2x2"), (1, "avg pool 3x3"), (0, "conv 3x3"), (2, "none"), (2, "conv 1x7-7x1"),
             (2, "avg pool 3x3"), (2, "avg pool 3x3"), (3, "conv 1x1"), (3, "none"), (0, "max pool 2x2"))  # fmt: skip


class On(nn.Module):
    """Apply a layer to one of the states; put the result in its place, or in between at `insert`."""

    def __init__(self, layer: nn.Module, state: int, insert: int | None = None) -> None:
        super().__init__()
        self.layer, self.state, self.insert = layer, state, insert

    def forward(self, states: States) -> States:
        i, end = (self.state, self.state + 1) if self.insert is None else (self.insert, self.insert)
        return (*states[:i], self.layer(states[self.state]), *states[end:])


class Repeat(nn.Module):
    """Hand the last state on twice; a lone tensor is the last."""

    def forward(self, states: Tensor | States) -> States:
        return (states, states) if isinstance(states, Tensor) else (*states, states[-1])


class Add(nn.Module):
    """Put the sum of two neighbouring states in their place."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def forward(self, states: States) -> States:
        i = self.left
        return (*states[:i], states[i] + states[i + 1], *states[i + 2 :])


class LastFirst(nn.Module):
    """Move the last state to the front."""

    def forward(self, states: States) -> States:
        return (states[-1], *states[:-1])


class Join(nn.Module):
    """Concatenate the last three states' channels; keep the first state beside."""

    def forward(self, states: States) -> States:
        return (states[0], torch.cat(states[5:8], dim=1))


class LastClassifier(Classifier):
    """Map the last state, (N, channels, 7, 7), to class scores."""

    def forward(self, states: States) -> Tensor:
        return super().forward((states[1], states[0]))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    todays = OPERATIONS[name](channels, stride)
    if "pool" not in name:
        return todays
    return nn.Sequential(todays, nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))


def older_amoebanetd(repeats: int, filters: int) -> nn.Sequential:
    """Build it with `repeats` normal cells in each of three groups: 325 layers where these are 4.

    Shapes: (N, 3, 224, 224) to (N, 10).
    """
    channels = filters // 4
    layers: list[nn.Module] = [*relu_conv_bn(3, channels, (3, 3), (2, 2)), Repeat()]
    older = newer = channels
    after_reduction = False
    for reduction in (True, True, *3 * (*repeats * (False,), True))[:-1]:
        channels *= 1 + reduction
        layers += [
            On(fit_older_state(older, channels, after_reduction), 0),
            Repeat(),
            On(relu_conv_bn(newer, channels), 1),
        ]
        for i, (state, name) in enumerate(REDUCTION if reduction else NORMAL):
            stride = 2 if reduction and state < 2 else 1
            layers.append(On(operation(name, channels, stride), state, 2 + i // 2 + i % 2))
            if i % 2:
                layers.append(Add(2 + i // 2))
        layers += [LastFirst(), Join()]
        older, newer, after_reduction = newer, 3 * channels, reduction
    return nn.Sequential(*layers, LastClassifier(newer, 10))


def older_resnet101() -> nn.Sequential:
    """Build ResNet-101 without the ReLUs after the first two convolutions of each bottleneck: 304 layers.

    Shapes: (N, 3, 224, 224) to (N, 1000).
    """
    kept = OrderedDict(
        (name, layer) for name, layer in resnet101().named_children() if not re.search("_relu[12]$", name)
    )
    return nn.Sequential(kept)
