"""What cannot become a sequence of layers is refused, with the line, the reason and what to do."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchgpipe import GPipe, sequential
from torchgpipe.trace import Untraceable

from .. import traced
from ..traced import WIDTH, does, rows


class Extra(traced.Residual):
    def get_extra_state(self) -> Any:
        return torch.ones(1)


def within_autocast(net: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return net.a(x)


def with_hooks_of_saved_tensors(net: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda y: 2 * y, lambda y: y):
        return net.b(net.a(x))


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
    "a hook of the graph": lambda net, x: (y := net.a(x)).grad_fn.register_hook(print) and net.b(y),
    "hooks of saved tensors": with_hooks_of_saved_tensors,
    "other parameters": lambda net, x: functional_call(net.a, {"weight": net.a.weight.detach()}, x),
    "a part that is frozen": lambda net, x: net.a.requires_grad_(False)(x),
    "gradients": lambda net, x: x * torch.autograd.grad(net.a(x).sum(), net.a.bias)[0],
    "whether a gradient is wanted": lambda net, x: net.a(x) if x.requires_grad else x,
    "the mode of gradients": lambda net, x: net.a(x) if torch.is_grad_enabled() else x,
    "strides": lambda net, x: net.a(x) if x.stride(0) == WIDTH else x,
    "contiguity": lambda net, x: net.a(x) if x.is_contiguous() else x,
    "a seed": lambda net, x: torch.manual_seed(3) and net.a(x),
    "the default generator": lambda net, x: torch.default_generator.manual_seed(3) and net.a(x),
    "another random number": lambda net, x: net.a(x) if random.random() < 0.5 else x,
    "a generator": lambda net, x: net.a(x) + torch.rand(x.shape, generator=net.draws),
    "a transform": lambda net, x: torch.vmap(torch.sin)(net.a(x)),
    "an array": lambda net, x: net.a(x) * torch.from_numpy(numpy.ones(WIDTH)),
    "a size in a partial": lambda net, x: net.call((partial(torch.mul, len(x)), net.a(x))),
    "a size that is returned": lambda net, x: {"y": net.a(x), "n": len(x)},
    "a shape that is returned": lambda net, x: (net.a(x), [x.shape]),
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
    "a hook on a tensor": (True, ["it sets or asks for register_hook, which may be otherwise, or would be missed"]),
    "a buffer that is replaced": (False, REPLACES),
    "a hook of the graph": (True, ["asks for grad_fn"]),
    "hooks of saved tensors": (
        False,
        ["the layers of Do give something else than the module does: the gradient of a.weight differs"],
    ),
    "other parameters": (True, ["asks for tensors in the place of parameters, by functional_call"]),
    "a part that is frozen": (True, ["asks for requires_grad_"]),
    "gradients": (True, ["asks for torch.autograd.grad"]),
    "whether a gradient is wanted": (True, ["asks for requires_grad"]),
    "the mode of gradients": (True, ["asks for the mode of gradients", "do that in a submodule of its own"]),
    "strides": (True, ["asks for stride"]),
    "contiguity": (True, ["asks for is_contiguous"]),
    "a seed": (True, ["asks for a random state"]),
    "the default generator": (False, ["Do sets a random state"]),
    "another random number": (True, ["asks for random numbers beside PyTorch's"]),
    "a generator": (True, ["asks for a generator of its own"]),
    "a transform": (True, ["torch.func transforms"]),
    "an array": (True, ["asks for an array of NumPy"]),
    "a size in a partial": (True, ["it passes functools.partial(<built-in method mul"]),
    "a size that is returned": (True, ["returns {'y': Tensor, 'n': 2}, {'y'", "return tensors alone"]),
    "a shape that is returned": (True, ["or returns (Tensor, [torch.Size([2, 6])])"]),
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
    module, sample = make(), rows()
    state = torch.get_rng_state()
    with pytest.raises(Untraceable) as caught:
        sequential(module, sample)
    assert torch.equal(state, torch.get_rng_state())
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
