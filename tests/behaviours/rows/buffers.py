"""Buffers and parameters that passes change, or that are there under another name: a second pass meets the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.task.contents import SMALL

from ...library.traced import Squared
from ..compare import REORDERED
from ..parts.layers import WIDTH, Do, linear, made
from ..row import Row, steps

LARGE = SMALL // 4 + 1  # elements


class Holds(nn.Module):
    """Scale by buffers, and in training do something to them."""

    def __init__(self, change: Callable[[Any], object], size: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(size))
        self.register_buffer("nothing", None)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        buffers: Any = (self.buffer, self.nothing, self.inner._buffers.get("late"))
        y = x * sum(k + (5 if b is None else b[:1].clone()) for k, b in enumerate(buffers))
        if self.training:
            self.change(self)
        return y


def in_place(layer: Any) -> None:
    layer.buffer.add_(1)


def another(layer: Any) -> None:
    layer.buffer = layer.buffer + 1


def in_the_free_place(layer: Any) -> None:
    layer.nothing = torch.zeros(2) if layer.nothing is None else layer.nothing + 1


def where_there_was_no_place(layer: Any) -> None:
    layer.inner.register_buffer("late", layer.inner._buffers.get("late", torch.zeros(2)) + 1)


def large_in_the_free_place(layer: Any) -> None:
    layer.nothing = torch.zeros(LARGE) if layer.nothing is None else layer.nothing


def two_of_one_memory(layer: Any) -> None:
    layer.nothing = layer.buffer.view(-1)
    layer.buffer.add_(1)


def nothing(layer: Any) -> None:
    pass


def then(change: Callable[[Any], object]) -> Callable[[Any, Tensor], Any]:
    """Change the layer between forward and backward."""

    def use(run: Any, x: Tensor) -> Any:
        y = run(x)
        change(run[1])
        y.square().sum().backward()

    return use


class Kind(nn.Parameter):
    """A kind of parameter that a layer may look for."""


class Looks(nn.Module):
    """Use what is written on parameters, their kinds, and which of them are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.kind = nn.Parameter(torch.ones(WIDTH)), Kind(torch.ones(WIDTH))
        self.marked = linear().bias
        vars(self.marked)["decay"] = 0.1
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.tied = self.plain
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.kind) is Kind and type(self.plain) is nn.Parameter and self.absent is None
        assert self.tied is self.plain and self.plain.is_leaf and self.plain.requires_grad
        return x * self.plain + self.kind * self.marked * vars(self.marked)["decay"] + self.tied * self.frozen


def replaced(layer: Any) -> None:
    layer.inner.weight = nn.Parameter(torch.zeros(2, 2))


def frozen(layer: Any) -> None:
    layer.inner.weight.requires_grad_(False)


def model(change: Callable[[Any], object], size: int = 2) -> Callable[[], nn.Sequential]:
    return made(linear, lambda: Holds(change, size), linear)


def reads_statistics() -> nn.Sequential:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(linear(), Do(lambda self, x: self.norm(x) + self.norm.running_mean, norm=norm), linear())


class Weighted(nn.Module):
    """Change its input in place, by a parameter: a copy of an input may take a gradient where the input takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.weight)


FORWARD = "'buffer' of Holds .* was changed in forward"
BETWEEN = "'nothing' of Holds in partition 0 was changed in place between forward and backward"
OTHER = "replaced, added or froze a parameter in its forward"
READS = "uses the running statistics of a batch norm"
OWN_GRAPHS = {"graph never": "", "": OTHER}


def checkpointed(message: str) -> dict[str, str]:
    return {"always": message, "except_last": message}


ROWS = [
    Row("a count in the passes", model(in_place), balance=(2, 1), use=steps),
    Row("a large one that counts", model(in_place, LARGE), balance=(2, 1), use=steps, refused=checkpointed(FORWARD)),
    Row("another buffer in the passes", model(another), balance=(2, 1), use=steps),
    Row("a buffer that comes in the passes", model(in_the_free_place), balance=(2, 1), use=steps),
    Row("a buffer that is registered in the passes", model(where_there_was_no_place), balance=(2, 1), use=steps),
    Row("a large one that the forward makes", model(large_in_the_free_place), balance=(2, 1), use=steps),
    Row("a large one that changes before the backward", model(large_in_the_free_place), balance=(2, 1),
        use=then(lambda layer: layer.nothing.add_(1)), refused=checkpointed(BETWEEN)),
    Row("a buffer that comes after them", model(nothing), balance=(2, 1), use=then(in_the_free_place)),
    Row("a buffer removed", model(nothing), balance=(2, 1), use=then(lambda layer: delattr(layer, "buffer"))),
    Row("another large one in the passes", model(another, LARGE), balance=(2, 1), refused=checkpointed(FORWARD)),
    Row("two that share memory", model(two_of_one_memory), balance=(2, 1), refused=checkpointed(FORWARD)),
    Row("statistics that another layer reads", reads_statistics, refused=checkpointed(READS), balance=(2, 1)),
    # One parameter by two names: its gradients are added up in another order.
    Row("what a layer knows of its parameters", made(linear, Looks, linear), balance=(1, 2), use=steps,
        tolerance=REORDERED),
    Row("a parameter replaced in forward", model(replaced), refused=OWN_GRAPHS, balance=(2, 1)),
    Row("a parameter frozen in forward", model(frozen), refused=OWN_GRAPHS, balance=(2, 1),
        without={"always": "autograd itself refuses it there, in the middle of backward"}),
    Row("a parameter without a shape", made(linear, partial(nn.LazyLinear, WIDTH), linear),
        refused={"graph never": "", "": r"LazyLinear has no shape for 'weight'.*run the layers once, then train"}),
    Row("a custom function at the end", made(linear, lambda: Squared.apply, linear), balance=(2, 1), use=steps),
    Row("a copy of an input in place", made(lambda: lambda x: x + 1, lambda: nn.ReLU(inplace=True), Weighted, linear),
        partial(torch.ones, 8, WIDTH), (1, 2, 1)),
]  # fmt: skip
