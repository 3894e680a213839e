"""Test cases with layers that `torch.jit.script` has compiled."""

from typing import Any

import torch
from torch import nn

from ...compare import REORDERED
from ...parts.layers import between_linears, linear
from ...row import but_graph_never, steps, three


def scripted() -> Any:
    """Return a layer that `torch.jit.script` has compiled."""
    return torch.jit.script(nn.Sequential(linear(), nn.Tanh()))


def frozen() -> Any:
    """Return a scripted layer after `torch.jit.freeze`, which makes its parameters constants."""
    return torch.jit.freeze(scripted().eval())


SCRIPTED = r"a scripted layer \(Linear\).*use the layer that was scripted"

# TorchScript rearranges the operations of a function after its first calls.
ROWS = [
    three(
        "a scripted layer",
        between_linears(scripted),
        refused=but_graph_never(SCRIPTED),
        tolerance=REORDERED,
    ),
    three("a frozen scripted layer", between_linears(frozen), use=steps, tolerance=REORDERED),
]
