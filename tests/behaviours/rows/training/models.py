"""Models and optimizers that several files of test cases use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...parts.layers import layer
from ...pipe import mlp

sgd = partial(torch.optim.SGD, lr=0.1)
adam = partial(torch.optim.Adam, lr=0.01)


def with_functions(*functions: Callable[..., Any]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a small model. Its middle layers call the given functions."""
    return lambda: mlp(*map(layer, functions))


def between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a small model, with the given layers in its middle."""
    return lambda: mlp(*(layer() for layer in layers))


normed = between(partial(nn.BatchNorm1d, 6))
