"""Define modules that `sequential` refuses, and texts that the error messages must have."""

import random
from collections.abc import Callable
from functools import partial
from random import gauss
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import LSTM, LazyLinear, Module, ReLU, Sequential

from .. import traced
from ..traced import WIDTH, does

AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def within_autocast(net: Any, x: Tensor) -> Any:
    with AUTOCAST:
        return net.a(x)


def with_hooks_of_saved_tensors(net: Any, x: Tensor) -> Any:
    with saved_tensors_hooks(lambda y: 2 * y, lambda y: y):
        return net.b(net.a(x))


def with_a_tensor_hook(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    y.register_hook(lambda grad: 2 * grad)
    return net.b(y)


def with_a_node_hook(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    y.grad_fn.register_hook(print)
    return net.b(y)


def with_other_tensors_as_parameters(net: Any, x: Tensor) -> Any:
    weight = net.a.weight.detach()
    return functional_call(net.a, {"weight": weight}, x)


def with_gradients(net: Any, x: Tensor) -> Any:
    total = net.a(x).sum()
    return x * torch.autograd.grad(total, net.a.bias)[0]


def reading_the_seed(net: Any, x: Tensor) -> Any:
    torch.initial_seed()
    return net.a(x)


def seeded(x: Tensor) -> Tensor:
    """Seed PyTorch's default generator and return `x`."""
    torch.default_generator.manual_seed(3)
    return x


def replacing(net: Any, x: Tensor) -> Any:
    net.count = net.count + 1
    return net.b(x) * net.count


def after(change: Callable[[Module], object]) -> Module:
    module = traced.Residual()
    change(module)
    return module


# Each value is a forward that cannot be recorded. The texts that its error must have are in another
# table, `SAID`: an error can quote the whole line of a forward, and would then contain these texts
# anyway if they were in that line.
FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a branch": lambda net, x: net.b(x) if net.a(x).sum() > 0 else x,
    "a number": lambda net, x: net.b(x) * net.a(x).mean().item(),
    "a loop over the batch": lambda net, x: torch.stack([net.a(row) for row in x]),
    "a factor of the batch size": lambda net, x: net.a(x) * (1 / len(x)),
    "a loss": lambda net, x: net.a(x).mean(),
    "samples in another dimension": lambda net, x: net.a(x).t(),
    "what compares samples": lambda net, x: net.a(x) - x.mean(0),
    "a position for each sample": lambda net, x: net.a(x) + torch.arange(len(x)).unsqueeze(1),
    "a parameter": lambda net, x: net.a.weight,
    "a hidden module": lambda net, x: net.hidden[0](net.a(x)),
    "autocast": within_autocast,
    "register_hook": with_a_tensor_hook,
    "a buffer that is replaced": replacing,
    "grad_fn": with_a_node_hook,
    "hooks of saved tensors": with_hooks_of_saved_tensors,
    "tensors in the place of parameters": with_other_tensors_as_parameters,
    "requires_grad_": lambda net, x: net.a.requires_grad_(False)(x),
    "torch.autograd.grad": with_gradients,
    "requires_grad": lambda net, x: net.a(x) if x.requires_grad else x,
    "the mode of gradients": lambda net, x: net.a(x) if torch.is_grad_enabled() else x,
    "stride": lambda net, x: net.a(x) if x.stride(0) == WIDTH else x,
    "is_contiguous": lambda net, x: net.a(x) if x.is_contiguous() else x,
    "a random state": reading_the_seed,
    "the default generator": lambda net, x: net.a(seeded(x)),
    "random numbers beside PyTorch's": lambda net, x: net.a(x) if random.random() < 0.5 else x,
    "random numbers in training": (
        lambda net, x: net.a(x) if net.training and random.random() < 0.5 else x
    ),
    "a generator of its own": lambda net, x: net.a(x) + torch.rand(x.shape, generator=net.draws),
    "a generator of its own in training": (
        lambda net, x: (
            net.a(x) + torch.rand(x.shape, generator=net.draws) if net.training else net.a(x)
        )
    ),
    "a transform": lambda net, x: torch.vmap(torch.sin)(net.a(x)),
    "an array of NumPy": lambda net, x: net.a(x) * torch.from_numpy(numpy.ones(WIDTH)),
    "a size in a partial": lambda net, x: net.call((partial(torch.mul, len(x)), net.a(x))),
    "a size that is returned": lambda net, x: {"y": net.a(x), "n": len(x)},
    "a shape that is returned": lambda net, x: (net.a(x), [x.shape]),
    "a size and no call": lambda net, x: (x, len(x)),
    "a closure that is returned": lambda net, x: (net.a(x), lambda: x),
    "an iterator that cannot be copied": lambda net, x: (y for y in [net.a(x)]),
    "a draw that is not noted": lambda net, x: net.b(x) if gauss(0, 1) < 99 else net.a(x),
}
REPLACES = [
    "`net.count = net.count + 1`",
    "another buffer 'count' (change it in place: self.count.copy_(…))",
]
COMPARES = [
    "other outputs for the two halves of the sample",
    "named in shared=[…]",
    "x - x.mean(0)",
    "whole=[…]",
]


def asks_for(name: str) -> list[str]:
    return [f"it sets or asks for {name},", "do that in a submodule"]


# For each key of `FORWARDS`: whether the error must quote the line of the forward, and which
# further texts the error must have. For a key of `FORWARDS` without an entry, the error must quote
# the line, and have the texts of `asks_for(key)`.
SAID: dict[str, tuple[bool, list[str]]] = {
    "a branch": (True, ["depends on what is in a tensor", "put that part into a submodule"]),
    "a number": (True, []),
    "a loop over the batch": (True, ["2, 3, 5 samples"]),
    "a factor of the batch size": (True, ["it passes 0.5, 0.33"]),
    "a generator of its own in training": (
        False,
        ["it sets or asks for a generator of its own,", "do that in a submodule"],
    ),
    "a loss": (True, ["shape () for 2 samples", "such as a loss, belongs after the pipeline"]),
    "samples in another dimension": (True, ["shape (6, 2) for 2 samples"]),
    "a size and no call": (False, ["2, 3, 5 samples", "that it returns ((Tensor, 2), (Tensor, 3)"]),
    "what compares samples": (False, COMPARES),
    "a position for each sample": (False, COMPARES),
    "a parameter": (False, ["returns a tensor that no call has made"]),
    "a hidden module": (True, ["not registered"]),
    "autocast": (False, ["`with AUTOCAST:`", "it sets or asks for autocast"]),
    "a buffer that is replaced": (False, REPLACES),
    "register_hook": (
        False,
        ["`y.register_hook(lambda grad: 2 * grad)`", *asks_for("register_hook")],
    ),
    "grad_fn": (False, ["`y.grad_fn.register_hook(print)`", *asks_for("grad_fn")]),
    "tensors in the place of parameters": (
        False,
        ['{"weight": weight}', *asks_for("tensors in the place of parameters")],
    ),
    "torch.autograd.grad": (
        False,
        ["torch.autograd.grad(total, net.a.bias)", *asks_for("torch.autograd.grad")],
    ),
    "hooks of saved tensors": (
        False,
        ["Do compute something else than the module does: the gradient of a.weight"],
    ),
    "a random state": (False, ["`torch.initial_seed()`", *asks_for("a random state")]),
    "the default generator": (True, ["asks for a random state"]),
    "a transform": (True, ["torch.func transforms"]),
    "a size in a partial": (True, ["it passes functools.partial(<built-in method mul"]),
    "a size that is returned": (
        True,
        ["that it returns ({'y': Tensor, 'n': 2}, {'y'", "only return tensors"],
    ),
    "a shape that is returned": (True, ["that it returns ((Tensor, [torch.Size([2, 6])])"]),
    "a closure that is returned": (True, ["that it returns ((Tensor, <function"]),
    "an iterator that cannot be copied": (False, ["TypeError: cannot pickle 'generator' object"]),
    "a draw that is not noted": (True, ["asks for a random state"]),
    "random numbers in training": (
        False,
        [
            "(`lambda net, x: net.a(x) if net.training and",
            *asks_for("random numbers beside PyTorch's"),
            "draw there by PyTorch",
        ],
    ),
}
SCRIPTED_PART = "Sequential has a scripted part, '0'"
WITHOUT_SHAPES = "without shapes, such as in '0'; run the module once"


class WithExtraState(traced.Residual):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1)


def recurrent() -> Module:
    """Return a module with an LSTM that mistakes the batch dimension of its input for time."""

    def forward(net: Any, x: Tensor) -> Any:
        output, _ = net.recurrent(x.unsqueeze(1))
        return output.squeeze(1)

    return does(forward, recurrent=LSTM(WIDTH, WIDTH))


def replacing_in_a_submodule() -> Module:
    return Sequential(does(replacing))


def branching_in_a_submodule() -> Module:
    branching = does(FORWARDS["a branch"])
    return Sequential(branching)


# Each value of this dictionary describes a module that is refused: a function that makes the
# module, whether the error must quote a line of `FORWARDS`, and other texts that the error must
# contain.
OTHERS: dict[str, tuple[Callable[[], Any], bool, list[str]]] = {
    "a branch, in a submodule": (branching_in_a_submodule, True, ["whole=[Do]"]),
    "a buffer that is replaced, in a submodule": (replacing_in_a_submodule, False, REPLACES),
    "a hook on all of it": (
        lambda: after(lambda m: m.register_forward_hook(print)),
        False,
        ["has hooks of its own"],
    ),
    "compiled": (lambda: after(lambda m: m.compile()), False, ["Residual is compiled"]),
    "compiled, around it": (
        lambda: torch.compile(traced.Residual()),
        False,
        ["OptimizedModule is compiled"],
    ),
    "compiled, its forward": (
        lambda: traced.compiled_forward(traced.Residual()),
        False,
        ["Residual is compiled"],
    ),
    "time before the batch": (recurrent, False, COMPARES),
    "scripted": (lambda: Sequential(torch.jit.script(ReLU())), False, [SCRIPTED_PART]),
    "lazy": (lambda: Sequential(LazyLinear(2)), False, [WITHOUT_SHAPES]),
    "checkpointing of its own": (
        lambda: after(lambda m: setattr(m, "gradient_checkpointing", True)),
        False,
        ["call module.gradient_checkpointing_disable()", "checkpoint='always'"],
    ),
    "a state of its own": (WithExtraState, False, ["_extra_state"]),
}
CASES = dict(OTHERS)
for _name, _forward in FORWARDS.items():
    _with_line, _said = SAID.get(_name, (True, asks_for(_name)))
    CASES[_name] = (partial(does, _forward), _with_line, _said)
