"""Test cases with layers that inspect, replace or freeze their parameters in forward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ....library.traced import Squared
from ...compare import REORDERED
from ...parts.layers import WIDTH, between_linears, linear
from ...row import Row, but_graph_never, steps, three
from .held import holding


class Kind(Parameter):
    """A subclass of `Parameter`."""


class Looks(nn.Module):
    """A layer that checks in forward that its parameters are as it has defined them.

    It has a parameter of a subclass, one with a Python attribute, a frozen one, and one with two
    names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain = Parameter(torch.ones(WIDTH))
        self.kind = Kind(torch.ones(WIDTH))
        self.marked = linear().bias
        vars(self.marked)["decay"] = 0.1
        self.frozen = Parameter(torch.ones(WIDTH), requires_grad=False)
        self.tied = self.plain
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.kind) is Kind
        assert type(self.plain) is Parameter
        assert self.absent is None
        assert self.tied is self.plain
        assert self.plain.is_leaf
        assert self.plain.requires_grad
        decay = vars(self.marked)["decay"]
        y = x * self.plain
        y = y + self.kind * self.marked * decay
        return y + self.tied * self.frozen


def replace_weight(layer: Any) -> None:
    layer.inner.weight = Parameter(torch.zeros(2, 2))


def freeze_inner(layer: Any) -> None:
    layer.inner.requires_grad_(False)


def squared() -> Any:
    return Squared.apply


OTHER = "replaced, added, froze or hooked a parameter in its forward"
SHAPELESS = r"LazyLinear has no shape for 'weight'.*run the layers once, then train"
OWN_GRAPHS = but_graph_never(OTHER)

ROWS = [
    # One parameter has two names. Its gradients are added up in another order.
    Row(
        "what a layer knows of its parameters",
        between_linears(Looks),
        balance=(1, 2),
        use=steps,
        tolerance=REORDERED,
    ),
    three("a parameter replaced in forward", holding(replace_weight), refused=OWN_GRAPHS),
    three(
        "a parameter frozen in forward",
        holding(freeze_inner),
        refused=OWN_GRAPHS,
        without={"always": "autograd itself refuses it there, in the middle of backward"},
    ),
    Row(
        "a parameter without a shape",
        between_linears(partial(nn.LazyLinear, WIDTH)),
        refused=but_graph_never(SHAPELESS),
    ),
    three("a custom function at the end", between_linears(squared), use=steps),
]
