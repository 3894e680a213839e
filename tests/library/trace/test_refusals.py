"""What cannot become a sequence of layers is refused, with the line, the reason and what to do."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.trace import Untraceable

from ...behaviours.parts.layers import Do
from .. import traced
from ..traced import WIDTH, rows


def does(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """Return a module with this forward, which may use a buffer, and a layer that is not registered."""
    a, b, hidden = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Do(function, a=a, b=b, hidden=[hidden], count=torch.zeros(()))


class Extra(traced.Residual):
    def get_extra_state(self) -> Any:
        return torch.ones(1)


def within_autocast(net: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return net.a(x)


def replacing(net: Any, x: Tensor) -> Any:
    net.count = net.count + 1
    return net.b(x) * net.count


def after(change: Callable[[nn.Module], object]) -> nn.Module:
    module = traced.Residual()
    change(module)
    return module


# A message names the line here, if it names one. What it says is in SAID, for it may quote its whole source line.
FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a branch": lambda net, x: net.b(x) if net.a(x).sum() > 0 else x,
    "a number": lambda net, x: net.b(x) * net.a(x).mean().item(),
    "a loop over the batch": lambda net, x: torch.stack([net.a(row) for row in x]),
    "a factor of the batch size": lambda net, x: net.a(x) * (1 / len(x)),
    "a loss": lambda net, x: net.a(x).mean(),
    "samples in another dimension": lambda net, x: net.a(x).t(),
    "a parameter": lambda net, x: net.a.weight,
    "a hidden module": lambda net, x: net.hidden[0](net.a(x)),
    "autocast": within_autocast,
    "a hook on a tensor": lambda net, x: (y := net.a(x)).register_hook(lambda grad: 2 * grad) and net.b(y),
    "a buffer that is replaced": replacing,
}
REPLACES = [
    "`net.count = net.count + 1`",
    "a forward replaces the buffer 'count' of Do; change it in place: self.count.copy_(…)",
]
# What the message says of each, and whether it names the line.
SAID: dict[str, tuple[bool, list[str]]] = {
    "a branch": (True, ["depends on what is in a tensor", "put that part into a submodule"]),
    "a number": (True, []),
    "a loop over the batch": (True, ["2, 3, 5 samples"]),
    "a factor of the batch size": (True, ["it passes 0.5, 0.33"]),
    "a loss": (True, ["shape () for 2 samples", "such as a loss, belongs after the pipeline"]),
    "samples in another dimension": (True, ["shape (6, 2) for 2 samples"]),
    "a parameter": (False, ["returns a tensor that no call has made"]),
    "a hidden module": (True, ["not registered"]),
    "autocast": (False, ["`with torch.autocast(", "it sets or asks for autocast"]),
    "a hook on a tensor": (True, ["register_hook would not be called for every micro-batch"]),
    "a buffer that is replaced": (False, REPLACES),
}
OTHERS: dict[str, tuple[Callable[[], Any], bool, list[str]]] = {
    "a branch, in a submodule": (lambda: nn.Sequential(does(FORWARDS["a branch"])), True, ["whole=[Do]"]),
    "a buffer that is replaced, in a submodule": (lambda: nn.Sequential(does(replacing)), False, REPLACES),
    "a hook on all of it": (lambda: after(lambda m: m.register_forward_hook(print)), False, ["has hooks of its own"]),
    "compiled": (lambda: after(lambda m: m.compile()), False, ["Residual is compiled"]),
    "compiled, around it": (lambda: torch.compile(traced.Residual()), False, ["OptimizedModule is compiled"]),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.ReLU())), False, ["Sequential has a scripted part, '0'"]),
    "a state of its own": (Extra, False, ["_extra_state"]),
}
CASES = {name: (partial(does, forward), *SAID[name]) for name, forward in FORWARDS.items()} | OTHERS


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, with_line, said = CASES[name]
    module = make()
    with pytest.raises(Untraceable) as caught:
        sequential(module, rows())
    message = str(caught.value)
    assert (f'`"{name.partition(",")[0]}": lambda' in message) == with_line
    assert [part for part in said if part not in message] == []
    freed = weakref.ref(module)
    del module, caught
    assert freed() is None or name == "compiled"  # a module that refers to itself


def masked(**given: Any) -> dict[str, Any]:
    return {"x": rows(), "mask": torch.arange(WIDTH) > 2, "double": True, **given}


# In what a call differs from the sample, and what the message says.
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"double": False}, "double is False, but was True in the sample"),
    ({"mask": None}, "mask is None, but was Tensor in the sample"),
    ({"x": rows(7)}, "x has shape (5, 7)"),
    ({"mask": torch.ones(1, dtype=torch.bool)}, "mask has shape (1,)"),
    ({"x": rows().double()}, "x has shape (5, 6) and type torch.float64"),
]


@pytest.mark.parametrize("given, message", CALLS)
@pytest.mark.parametrize("pipeline", [True, False])
def test_called_otherwise(pipeline: bool, given: dict[str, Any], message: str) -> None:
    layers = sequential(traced.Masked(), masked())
    model = GPipe(layers, [len(layers)], devices=["cpu"]) if pipeline else layers
    with pytest.raises(ValueError) as caught:
        model(**masked(**given))
    assert message in str(caught.value)


def of_the_other_mode() -> None:
    layers = sequential(does(lambda net, x: (net.a(x), net.b(x)) if net.training else net.b(x)), rows())
    assert len(layers(rows())) == 2
    layers.eval()(rows())


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: sequential(traced.Residual(), rows(7)), RuntimeError, r"cannot be multiplied \(5x7 and 6x6\)"),
        (of_the_other_mode, RuntimeError, "traced in training mode, and in the other it does something else, at .*:"),
        (lambda: sequential(traced.Residual(), rows(), shared=["y"]), ValueError,
         r"shared names \['y'\], but the tensors are in \['x'\]"),
        (lambda: sequential(traced.Residual(), rows(), whole=[nn.Conv2d]), ValueError,
         "Residual has no submodule <class"),
    ],
)  # fmt: skip
def test_misuse(act: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()
