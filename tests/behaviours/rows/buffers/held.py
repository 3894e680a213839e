"""Test cases with buffers that layers read and change in forward."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

from torchgpipe.task.guards import buffers

from ...parts.layers import WIDTH, Do, between_linears, linear
from ...row import Row, amid, but_never, steps, three

LARGE = buffers.SMALL // 4 + 1
"""The number of elements of a buffer just too large to be a small buffer for the pipeline."""


# `Holds`, a layer with buffers, and functions that change the buffers.


class Holds(nn.Module):
    """A layer that scales its input by a number that depends on its buffers.

    In training, it changes one of its buffers.

    Args:
        change: A function that takes the layer and changes one of its buffers.
        size: The number of elements of the buffer named `buffer`.
    """

    def __init__(self, change: Callable[[Any], object], size: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(size))
        self.register_buffer("nothing", None)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        held: Any = (self.buffer, self.nothing, self.inner._buffers.get("late"))
        scale = 0
        for k, buffer in enumerate(held):
            scale = scale + k + (5 if buffer is None else buffer[:1].clone())
        y = x * scale
        if self.training:
            self.change(self)
        return y


def holding(change: Callable[[Any], object], size: int = 2) -> Callable[[], nn.Sequential]:
    return between_linears(partial(Holds, change, size))


def unchanged(_: Any) -> None:
    pass


def in_place(layer: Any) -> None:
    layer.buffer.add_(1)


def by_data(layer: Any) -> None:
    layer.buffer.data.add_(1)


def another(layer: Any) -> None:
    layer.buffer = layer.buffer + 1


def in_the_free_place(layer: Any) -> None:
    if layer.nothing is None:
        layer.nothing = torch.zeros(2)
    else:
        layer.nothing = layer.nothing + 1


def register_late(layer: Any) -> None:
    late = layer.inner._buffers.get("late", torch.zeros(2))
    layer.inner.register_buffer("late", late + 1)


def once(layer: Any) -> None:
    """Replace the layer's buffer in the first call only, as a layer that allocates a cache does."""
    if "grown" not in vars(layer):
        layer.grown, layer.buffer = True, layer.buffer + 1


def fill_the_free_place(run: Any, _: Tensor) -> None:
    in_the_free_place(run[1])


def remove_the_buffer(run: Any, _: Tensor) -> None:
    del run[1].buffer


# Other layers that change buffers.


def add_then_scale(self: Any, x: Tensor) -> Tensor:
    self.one.data.add_(1)
    return x * self.other.clone()


def two_of_one_memory() -> nn.Module:
    memory = torch.ones(WIDTH)
    return Do(add_then_scale, one=memory, other=memory.view(-1))


def adapt_then_norm(self: Any, x: Tensor) -> Tensor:
    self.norm.running_mean.data.add_(x.detach().mean(0))
    y: Tensor = self.norm(x)
    return y


def adapts() -> nn.Module:
    """Return a layer that changes the running mean of its batch norm, which is in eval mode."""
    norm = nn.BatchNorm1d(WIDTH, affine=False).eval()
    return Do(adapt_then_norm, norm=norm)


def count_and_scale(layer: Any, _: Any, y: Tensor) -> Tensor:
    return y * layer.seen.add_(1).clone()


def counts() -> nn.Module:
    """Return a batch norm with an additional buffer, which a forward hook changes."""
    norm = nn.BatchNorm1d(WIDTH)
    norm.register_buffer("seen", torch.ones(()))
    norm.register_forward_hook(count_and_scale)
    return norm


def times_attribute(self: Any, x: Tensor) -> Tensor:
    return x * getattr(self.buffer, "scale", 1)


def marked() -> nn.Module:
    """Return a layer that reads a Python attribute of its buffer."""
    layer = Do(times_attribute, buffer=torch.ones(WIDTH))
    vars(layer.buffer)["scale"] = 3.0
    return layer


def sign_then_negate(self: Any, x: Tensor) -> Tensor:
    y = torch.copysign(x, self.buffer)
    self.buffer.data.neg_()
    return y


def signed() -> nn.Module:
    return Do(sign_then_negate, buffer=torch.zeros(()))


def add_and_scale(self: Any, x: Tensor) -> Tensor:
    return x * self.buffer.add_(1).clone()


def views_in_two() -> nn.Sequential:
    """Build a model in which two layers change the same memory, of which their buffers are views.

    The layers are in different partitions.
    """
    buffer = torch.ones(WIDTH)
    one = Do(add_and_scale, buffer=buffer)
    other = Do(add_and_scale, buffer=buffer.view(1, -1))
    return nn.Sequential(linear(), one, other, linear())


def norm_by_function(self: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(x, self.mean, self.var, training=True)
    return y * (1 + self.mean * self.var)


def own_norm() -> nn.Module:
    """Return a batch norm with running statistics that does not use PyTorch's norm classes."""
    return Do(norm_by_function, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH))


def norm_of_two(make: Callable[[], nn.Module] = own_norm) -> nn.Sequential:
    """Build a model in which the first and the last partition share one norm layer."""
    norm = make()
    return nn.Sequential(nn.Sequential(norm), linear(), linear(), nn.Sequential(norm))


def add_sparse(self: Any, x: Tensor) -> Tensor:
    return x + (self.adjacency @ x[:2]).sum()


def sparse() -> nn.Module:
    return Do(add_sparse, adjacency=torch.eye(2).to_sparse())


# Layers that read the running statistics of a norm inside the layer.


def by_name(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.norm(x) + self.norm.running_mean
    return y


def by_buffers(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.norm(x) + next(self.norm.buffers())
    return y


def reading(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Do(function, norm=nn.BatchNorm1d(WIDTH))


UNCOUNTED = "'buffer' of Holds in partition 0 was changed .*, which PyTorch does not count"
READS = "uses the running statistics of a batch norm"
SAME_BUFFER = "change the same buffer"

ROWS = [three("a count in the passes", holding(in_place), use=steps)]
for size in (2, LARGE):
    name = f"a count by `.data`, which PyTorch does not count, {size} elements"
    ROWS.append(three(name, holding(by_data, size), use=steps))
for size, refused in ((2, {}), (LARGE, but_never(UNCOUNTED))):
    row = three(
        f"a count on a device to wait for, {size} elements",
        holding(by_data, size),
        use=patch.object(buffers, "COMPARED", ["meta"])(steps),
        refused=refused,
    )
    ROWS.append(row)
ROWS.append(three("statistics of an own norm", between_linears(own_norm), use=steps))
for m, by in ((3, ""), (1, "ranks")):
    row = Row(
        f"statistics of an own norm of two partitions, m={m}",
        norm_of_two,
        balance=(2, 2),
        use=steps,
        chunks=m,
        refused={by: SAME_BUFFER},
    )
    ROWS.append(row)
for what, layer in (
    ("statistics of a norm in evaluation mode", adapts),
    ("a norm with a buffer of its own", counts),
    ("attributes of a buffer", marked),
    ("the sign of a zero, which is equal to the other one", signed),
):
    ROWS.append(three(what, between_linears(layer), use=steps))
ROWS += [
    three("a buffer that grows once", holding(once), use=steps, refused=but_never("not a buffer")),
    Row(
        "one memory in buffers of two partitions",
        views_in_two,
        balance=(2, 2),
        use=steps,
        refused={"": SAME_BUFFER},
    ),
    three(
        "an observer of quantization",
        between_linears(FusedMovingAvgObsFakeQuantize),
        use=steps,
        note="The observer is one that `prepare_qat` adds to a model for quantization-aware "
        "training.",
    ),
    three("a sparse buffer", between_linears(sparse), use=steps),
    three("another buffer in the passes", holding(another), use=steps),
    three("a buffer that comes in the passes", holding(in_the_free_place), use=steps),
    three("a buffer that is registered in the passes", holding(register_late), use=steps),
    three("a buffer that comes after them", holding(unchanged), use=amid(fill_the_free_place)),
    three("a buffer removed", holding(unchanged), use=amid(remove_the_buffer)),
    three("two that share memory", between_linears(two_of_one_memory), use=steps),
]
for how, function in (("name", by_name), ("`buffers()`", by_buffers)):
    layers = between_linears(partial(reading, function))
    name = f"statistics that another layer reads by {how}"
    ROWS.append(three(name, layers, refused=but_never(READS)))
