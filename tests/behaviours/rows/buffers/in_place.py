"""Test cases in which layers or the caller change inputs or outputs in place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....library.layers import same
from ....plain import Plain
from ...parts.kinds import KINDS
from ...parts.layers import WIDTH, Do, linear, made, real
from ...row import Row, but_never, steps

# Layers.


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def relu_within() -> nn.Module:
    """Return an `nn.Sequential` whose input is changed in place by a ReLU in an inner module."""
    inner = nn.Sequential(nn.Flatten(), relu())
    return nn.Sequential(nn.Identity(), inner, linear())


def add_one(x: Tensor) -> Tensor:
    """Add 1 in place.

    Unlike `nn.ReLU`, a layer of this function has no attribute `inplace`, from which a pipeline
    could tell that it works in place.
    """
    return x.add_(1)


adding = partial(same, add_one)


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def times_weight(self: Any, x: Tensor) -> Tensor:
    return x.mul_(self.weight)


def weighted() -> nn.Module:
    """Return a layer that multiplies its input by a parameter in place.

    In a pipeline, the layer changes a copy of the input. This copy requires grad afterwards, even
    if the input does not.
    """
    return Do(times_weight, weight=nn.Parameter(torch.ones(WIDTH)))


def twice(kind: Any) -> Any:
    return made(linear, kind, linear, kind, linear)


def doubled() -> nn.Module:
    return KINDS["twice"](None)


def with_its_buffer() -> nn.Module:
    return KINDS["and its buffer in place"](None)


def summed() -> nn.Module:
    return KINDS["sum"](None)


# Uses of the model.


def at_the_start(run: Any, x: Tensor) -> list[Tensor]:
    """Run a step of a model whose first layer is a ReLU that works in place. Return the input.

    A pipeline must leave the caller's input unchanged. To get the expected results without a
    pipeline, an ordinary ReLU replaces the first layer. A ReLU in place would raise an error there:
    the micro-batches are views of the input, and PyTorch forbids changing such views in place.
    """
    if isinstance(run, Plain):
        run[0] = nn.ReLU()
    run(x).square().sum().backward()
    return [x]


def forward_only(run: Any, x: Tensor) -> Any:
    return run(x)


def changed_after(run: Any, x: Tensor) -> list[Tensor]:
    one, other = run(x)
    return [one.add_(1).detach(), other.mul_(2).detach()]


def changed_before_backward(run: Any, x: Tensor) -> None:
    """Change the output of a sigmoid in place, although the sigmoid's backward needs it."""
    y = run(x)
    y.mul_(2)
    y.sum().backward()


SAYS = r"partition 1 changed its input in place.*checkpoint='never'"
USED_AGAIN = "was changed in place before the partition took it"
BY_AUTOGRAD = "modified by an inplace operation"

ROWS = [
    Row(
        "a copy of an input in place",
        made(partial(same, plus_one), relu, weighted, linear),
        partial(torch.ones, 8, WIDTH),
        (1, 2, 1),
    ),
    Row("relu within a partition", twice(relu), balance=(2, 3), use=steps),
    Row("add within a partition", twice(adding), balance=(2, 3), use=steps),
    # A layer with the attribute `inplace=True` gets a copy of the partition's input if it is the
    # first layer of the partition, or if only `Identity` and `Flatten` come before it.
    Row("relu at a partition's start", twice(relu), balance=(1, 2, 2), use=steps),
    Row(
        "relu within others at a partition's start",
        twice(relu_within),
        balance=(1, 2, 2),
        use=steps,
    ),
    Row(
        "add at a partition's start",
        twice(adding),
        balance=(1, 2, 2),
        use=steps,
        refused=but_never(SAYS),
    ),
]
for balance in ((1, 2), (2, 1)):
    row = Row(
        f"at the model's start, {balance}",
        made(relu, linear, nn.Tanh),
        partial(real, grad=False),
        balance,
        use=at_the_start,
        without={"one micro-batch": "the input is changed, as without a pipeline"},
    )
    ROWS.append(row)
ROWS += [
    # With one micro-batch, the pipeline does not concatenate (and thereby copy) outputs.
    Row(
        "an output changed by the caller",
        made(nn.Identity, doubled),
        balance=(1, 1),
        chunks=1,
        use=changed_after,
        without={"graph": "autograd refuses it where one graph has all"},
    ),
    Row(
        "an output whose memory is used again",
        made(with_its_buffer, summed),
        balance=(1, 1),
        use=forward_only,
        refused={"": USED_AGAIN},
        without={"workers": "when they use it again is left to chance", "ranks": "likewise"},
    ),
    Row(
        "an output changed by the caller that backward needs",
        made(linear, nn.Sigmoid),
        balance=(1, 1),
        chunks=1,
        use=changed_before_backward,
        refused={"except_last": BY_AUTOGRAD, "never": BY_AUTOGRAD},
        without={"always": "the output is a copy"},
    ),
]
