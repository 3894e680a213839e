"""What cannot become a sequence of layers is refused, with the line, the reason and what to do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.trace import Untraceable

from .. import traced
from ..traced import BATCH, WIDTH, Net, rows


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.a(x).sum() > 0:  # branches
            return self.b(x)
        return x


class Item(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.a(x).mean().item()  # item


class Loop(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(row) for row in x])  # loop


class Mean(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y * (1 / len(y))  # mean


class Loss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).mean()  # loss


class Transposed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).t()


class Own(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a.weight


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return self.more[0](self.a(x))  # hidden


class Casting(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # casting
            return self.a(x)


class Extra(Net):
    def get_extra_state(self) -> Any:
        return torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Hooking(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.register_hook(lambda grad: 2 * grad)  # hooking
        return self.b(y)


def hooked() -> nn.Module:
    module = traced.Residual()
    module.register_forward_hook(lambda *_: None)
    return module


def compiled() -> nn.Module:
    module = traced.Residual()
    module.compile()
    return module


def compiled_around() -> Any:
    return torch.compile(traced.Residual())


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


# A module, and what the message says.
REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a branch": (Branching, ["# branches", "depends on what is in a tensor", "put that part into a submodule"]),
    "a branch in a submodule": (lambda: Outer(Branching()), ["# branches", "whole=[Branching]"]),
    "a number": (Item, ["# item"]),
    "a loop over the batch": (Loop, ["# loop", "2, 3, 5 samples"]),
    "a factor of the batch size": (Mean, ["# mean", "it passes 0.5, 0.33"]),
    "a loss": (Loss, ["# loss", "shape () for 2 samples", "such as a loss, belongs after the pipeline"]),
    "samples in another dimension": (Transposed, ["shape (6, 2) for 2 samples"]),
    "a parameter": (Own, ["returns a tensor that no call has made"]),
    "a module in a list": (Hidden, ["# hidden", "not registered"]),
    "autocast": (Casting, ["# casting", "autocast"]),
    "a hook on a tensor": (Hooking, ["# hooking", "register_hook would not be called for every micro-batch"]),
    "a hook on all of it": (hooked, ["Residual has hooks of its own"]),
    "compiled": (compiled, ["Residual is compiled"]),
    "compiled, around it": (compiled_around, ["OptimizedModule is compiled"]),
    "scripted": (scripted, ["Sequential has a scripted part, '0'"]),
    "a state of its own": (Extra, ["_extra_state"]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("make, said", REFUSED.values(), ids=REFUSED)
def test_refused(make: Callable[[], nn.Module], said: list[str]) -> None:
    module = make()
    with pytest.raises(Untraceable) as caught:
        sequential(module, rows())
    for part in said:
        assert part in str(caught.value)
    freed = weakref.ref(module)
    del module, caught
    assert freed() is None or make is compiled  # a module that refers to itself


def test_a_sample_that_does_not_fit_raises_what_the_module_does() -> None:
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x7 and 6x6\)"):
        sequential(traced.Residual(), rows(7))


def masked() -> Any:
    return sequential(traced.Masked(), {"x": rows(), "mask": torch.arange(WIDTH) > 2, "double": True})


# What the layers are called with, and what the message says.
MASK = torch.arange(WIDTH) > 2
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"x": rows(), "mask": MASK, "double": False}, "double is False, but was True in the sample"),
    ({"x": rows(), "double": True}, "mask is None, but was Tensor in the sample"),
    ({"x": rows(7), "mask": MASK, "double": True}, "x has shape (5, 7)"),
    ({"x": rows(), "mask": MASK[:1], "double": True}, "mask has shape (1,)"),
    ({"x": rows().double(), "mask": MASK, "double": True}, "x has shape (5, 6) and type torch.float64"),
]


@pytest.mark.parametrize("given, message", CALLS)
@pytest.mark.parametrize("pipeline", [True, False])
def test_called_otherwise(pipeline: bool, given: dict[str, Any], message: str) -> None:
    layers = masked()
    model = GPipe(layers, [len(layers)], devices=["cpu"]) if pipeline else layers
    with pytest.raises(ValueError) as caught:
        model(**given)
    assert message in str(caught.value)


class Auxiliary(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return (self.b(y), self.c(y)) if self.training else self.b(y)


def test_the_other_mode() -> None:
    layers = sequential(Auxiliary(), rows())
    assert len(layers(rows())) == 2
    with pytest.raises(RuntimeError, match=r"traced in training mode, and in the other it does something else, at .*:"):
        layers.eval()(rows())


def test_tied_weights_on_two_devices() -> None:
    layers = sequential(traced.Tied(), torch.randint(9, (BATCH, 4)))
    with pytest.raises(ValueError, match=r"'embedding.weight' and 'head.weight' are one parameter"):
        GPipe(layers, [1, len(layers) - 1], devices=["cpu", "meta"])


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"shared names \['y'\], but the tensors are in \['x'\]"):
        sequential(traced.Residual(), rows(), shared=["y"])
    with pytest.raises(ValueError, match=r"Residual has no submodule <class"):
        sequential(traced.Residual(), rows(), whole=[nn.Conv2d])


class Counts(nn.Module):
    """Replace a buffer in forward, which a recording of calls would not do again."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x) * self.count


@pytest.mark.parametrize("build", [Counts, lambda: nn.Sequential(Counts(), nn.ReLU())], ids=["itself", "a submodule"])
def test_a_buffer_that_is_replaced(build: Any) -> None:
    with pytest.raises(Untraceable) as caught:
        sequential(build(), torch.rand(BATCH, 4))
    assert "self.count = self.count + 1" in str(caught.value)
    assert "a forward replaces the buffer 'count' of Counts; change it in place: self.count.copy_(…)" in str(
        caught.value
    )
