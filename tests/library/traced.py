"""Define modules for tests of tracing, with sample inputs. None of them is an `nn.Sequential`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Linear,
    Module,
    Parameter,
    ReLU,
    Sequential,
)

from ..behaviours.parts.layers import Do

BATCH, WIDTH = 5, 6


class Net(Module):
    """A base class with three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Linear(WIDTH, WIDTH)
        self.b = Linear(WIDTH, WIDTH)
        self.c = Linear(WIDTH, WIDTH)


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return self.c(x + y) + y


class InPlace(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = Conv2d(3, 4, 3, padding=1), Conv2d(3, 4, 1)
        self.norm, self.relu = BatchNorm2d(4), ReLU(inplace=True)
        self.out = Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        view = y[:, :2]
        y += self.down(x)
        y = self.relu(y)
        return self.out(y) * view


def filling(net: Any, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 2, WIDTH, dtype=x.dtype, device=x.device)
    y[:, 0] = net.a(x)
    y[:, 1] = net.b(x)
    return net.c(y).flatten(1)


class Tokens(Net):
    """A module like a small vision transformer. Its attention consists of basic operators."""

    inner: Any
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token = Parameter(torch.randn(1, 1, WIDTH))
        self.inner = Module()
        self.inner.scale = Parameter(torch.randn(WIDTH))
        self.register_buffer("positions", torch.randn(1, 4, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]

        def heads(layer: Module) -> Tensor:
            return layer(x).view(n, 4, 2, -1).transpose(1, 2).reshape(n * 2, 4, -1)

        token = self.token.expand(n, -1, -1)
        x = torch.cat([token, x], dim=1) + self.positions
        q, k, v = heads(self.a), heads(self.b), heads(self.c)
        scores = q @ k.transpose(1, 2) / math.sqrt(3)
        y = torch.bmm(torch.softmax(scores, -1), v)
        y = y.view(n, 2, 4, -1).transpose(1, 2).flatten(2)
        return (y * self.inner.scale)[:, 0]


class Masked(Net):
    def forward(self, x: Tensor, *, mask: Tensor | None = None, double: bool = False) -> Tensor:
        y = self.a(x)
        masked = y if mask is None else y.masked_fill(mask, 0.0)
        y = self.b(masked)
        if mask is not None:
            y = y * mask
        return self.c(2 * y if double else y)


class Square(Net):
    """A module with a mask of shape (tokens, tokens), which no micro-batch may split."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.a(x)
        scores = y @ y.transpose(1, 2) + mask
        return self.b(torch.softmax(scores, -1) @ y)


@dataclass
class Found:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


class Structured(Net):
    def forward(self, inputs: dict[str, Tensor], kind: str = "dict") -> Any:
        first = self.a(inputs["x"])
        second = self.b(first) + inputs["y"]
        logits = self.c(second)
        if kind == "dict":
            return {"logits": logits, "more": [first, None, 3]}
        return Found(logits, (first, second, logits))


class Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(9, WIDTH)
        self.inner = Linear(WIDTH, WIDTH)
        self.head = Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x)))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # The gradient is wrong on purpose, to show that this backward ran.
        (x,) = ctx.saved_tensors
        return 3 * grad * x


class Unusual(Net):
    """A module that calls a layer with and without gradients, and uses an autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
        z = self.b(Squared.apply(self.a(x)))
        return self.c(z * y + y.detach())


class Constant(Net):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.randn(WIDTH)  # not a buffer
        self.unused = Parameter(torch.randn(2))
        self.aside = BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(WIDTH, device=x.device, dtype=x.dtype)
        self.plain.mul_(0.5)
        return self.b(self.a(x) + self.plain + steps)


def add_noise(layer: Any, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=layer.draws)


class Counting(Net):
    """A module whose forward changes a buffer, statistics of a norm, and a generator's state."""

    seen: Tensor
    noise: Any

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.noise = Do(add_noise, draws=torch.Generator())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.b(self.noise(self.norm(self.a(x))))


def drop_half(layer: Any, x: Tensor) -> Tensor:
    return F.dropout(layer.linear(x), 0.5, layer.training)


class Dropping(Net):
    """A module with an `nn.Dropout`, and with a layer that calls `F.dropout` in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Do(drop_half, linear=Linear(WIDTH, WIDTH))
        self.plain = Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.plain(x)
        return self.b(x + 2 * y) + self.drop(self.c(x))


class Choosing(Net):
    """A module whose forward chooses a layer by the values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def in_blocks(net: Any, x: Tensor) -> Tensor:
    blocks = [net.a(x[i : i + 8]) for i in range(0, len(x), 8)]
    return torch.cat(blocks)


class Case(NamedTuple):
    """A test case: functions that make a module and its arguments, and options of `sequential`."""

    make: Callable[[], Module]
    sample: Callable[[], Any]
    options: Any = MappingProxyType({})


def rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *(shape or (WIDTH,)))


def does(function: Callable[[Any, Tensor], Any], **more: Any) -> Module:
    """Return a module whose forward is `function(module, input)`."""
    a, b, c, hidden = [Linear(WIDTH, WIDTH) for _ in range(4)]
    holds: dict[str, Any] = {
        "count": torch.zeros(()),
        "scales": [torch.ones(()), 2 * torch.ones(())],
    }
    call = Do(lambda _, given: given[0](given[1]))
    return Do(
        function,
        a=a,
        b=b,
        c=c,
        call=call,
        hidden=[hidden],
        draws=torch.Generator(),
        **holds,
        **more,
    )


def compiled_forward(module: Any) -> Module:
    module.forward = torch.compile(module.forward, backend="aot_eager")
    return module


def without_a_for_one(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x)) if len(x) > 1 else net.b(x)


def seeding_for_many(net: Any, x: Tensor) -> Tensor:
    if len(x) >= 9:
        torch.manual_seed(3)
    return net.a(x)


def by_mode(net: Any, x: Tensor) -> Tensor:
    return net.a(x) if net.training else net.b(x)


def on_its_device(net: Any, x: Tensor) -> Tensor:
    return net.a(x) + torch.arange(6, device=x.device)


def norm() -> Module:
    return Sequential(Linear(6, 6), BatchNorm1d(6))


def three_branches(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.a(x), net.b(x), net.c(x)], 1)


def with_a_layout(net: Any, x: Tensor) -> Tensor:
    zeros = torch.zeros(6, layout=x.layout)
    return net.b(net.a(x) + zeros)


def choosing_in_the_middle() -> Module:
    return Sequential(Linear(WIDTH, WIDTH), Choosing(), Linear(WIDTH, WIDTH))


# Each value of this dictionary has a function that makes a module, batch sizes for which the module
# runs the recorded operators, and batch sizes for which it runs other operators.
BATCHES: dict[str, tuple[Callable[[], Module], list[int], list[int]]] = {
    "one sample": (lambda: does(without_a_for_one), [2, 9], [1]),
    "blocks": (lambda: does(in_blocks), [1, 8], [9]),
    "a constant": (lambda: does(lambda net, x: net.a(x) * net.scales[len(x) > 8]), [1, 8], [9]),
    "a part that needs contents": (lambda: Sequential(does(in_blocks), Choosing()), [1, 8], [9]),
    "a seed for many": (lambda: does(seeding_for_many), [1, 8], [9]),
    "another mode": (lambda: does(by_mode), [], [1, 5]),
    "what asks for the device": (lambda: does(on_its_device), [1, 9], []),
    "a norm, in training for two or more": (norm, [1, 9], []),
}

CASES: dict[str, Case] = {
    "residual": Case(Residual, rows),
    "branches from one input": Case(lambda: does(three_branches), rows),
    "in place, with views": Case(InPlace, lambda: rows(3, 4, 4)),
    "a tensor that is filled": Case(lambda: does(filling), rows),
    "a layout": Case(lambda: does(with_a_layout), rows),
    "attention by hand": Case(Tokens, lambda: rows(3, WIDTH)),
    "no mask": Case(Masked, rows),
    "by keyword, a mask of one sample": Case(
        Masked, lambda: {"x": rows(), "mask": torch.arange(WIDTH) % 2 == 0}
    ),
    "an object, a mask for each sample": Case(
        Masked, lambda: {"x": rows(), "mask": rows() > 0, "double": partial(bool, 1)}
    ),
    "a mask of tokens": Case(Square, lambda: (rows(4, WIDTH), torch.randn(4, 4))),
    "a mask as long as the batch": Case(
        Square, lambda: (rows(BATCH, WIDTH), torch.randn(BATCH, BATCH))
    ),
    "a mask, said to be shared": Case(
        Square, lambda: (rows(4, WIDTH), torch.randn(4, 4)), {"shared": ["mask"]}
    ),
    "dictionaries": Case(Structured, lambda: ({"x": rows(), "y": rows()},)),
    "a dataclass": Case(
        Structured, lambda: {"inputs": {"x": rows(), "y": rows()}, "kind": "dataclass"}
    ),
    "used twice, without gradients, and a custom function": Case(Unusual, rows),
    "constants, and what is not used": Case(Constant, rows),
    "buffers that change": Case(Counting, rows),
    "a set": Case(lambda: does(lambda net, x: {net.b(net.a(x))}), rows),
    "a part that looks at its input": Case(choosing_in_the_middle, rows, {"whole": [Choosing]}),
}
