"""What cannot become a sequence of layers is refused, with the line, the reason and what to do."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from random import gauss
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchgpipe import GPipe, sequential
from torchgpipe.trace import Untraceable
from torchgpipe.trace.recorder import random_states

from .. import traced
from ..traced import WIDTH, does, rows

AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def within_autocast(net: Any, x: Tensor) -> Any:
    with AUTOCAST:
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
    "what compares samples": lambda net, x: net.a(x) - x.mean(0),
    "a position for each sample": lambda net, x: net.a(x) + torch.arange(len(x)).unsqueeze(1),
    "a parameter": lambda net, x: net.a.weight,
    "a hidden module": lambda net, x: net.hidden[0](net.a(x)),
    "autocast": within_autocast,
    "register_hook": lambda net, x: (
        (y := net.a(x)).register_hook(lambda grad: 2 * grad) and net.b(y)
    ),
    "a buffer that is replaced": replacing,
    "grad_fn": lambda net, x: (y := net.a(x)).grad_fn.register_hook(print) and net.b(y),
    "hooks of saved tensors": with_hooks_of_saved_tensors,
    "tensors in the place of parameters": lambda net, x: functional_call(
        net.a, {"weight": net.a.weight.detach()}, x
    ),
    "requires_grad_": lambda net, x: net.a.requires_grad_(False)(x),
    "torch.autograd.grad": lambda net, x: x * torch.autograd.grad(net.a(x).sum(), net.a.bias)[0],
    "requires_grad": lambda net, x: net.a(x) if x.requires_grad else x,
    "the mode of gradients": lambda net, x: net.a(x) if torch.is_grad_enabled() else x,
    "stride": lambda net, x: net.a(x) if x.stride(0) == WIDTH else x,
    "is_contiguous": lambda net, x: net.a(x) if x.is_contiguous() else x,
    "a random state": lambda net, x: torch.initial_seed() and net.a(x),
    "the default generator": lambda net, x: torch.default_generator.manual_seed(3) and net.a(x),
    "random numbers beside PyTorch's": lambda net, x: net.a(x) if random.random() < 0.5 else x,
    "a generator of its own": lambda net, x: net.a(x) + torch.rand(x.shape, generator=net.draws),
    "a transform": lambda net, x: torch.vmap(torch.sin)(net.a(x)),
    "an array of NumPy": lambda net, x: net.a(x) * torch.from_numpy(numpy.ones(WIDTH)),
    "a size in a partial": lambda net, x: net.call((partial(torch.mul, len(x)), net.a(x))),
    "a size that is returned": lambda net, x: {"y": net.a(x), "n": len(x)},
    "a shape that is returned": lambda net, x: (net.a(x), [x.shape]),
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
# Whether the message names the line, and what it says: of others, that the forward sets or asks for what their name is.
SAID: dict[str, tuple[bool, list[str]]] = {
    "a branch": (True, ["depends on what is in a tensor", "put that part into a submodule"]),
    "a number": (True, []),
    "a loop over the batch": (True, ["2, 3, 5 samples"]),
    "a factor of the batch size": (True, ["it passes 0.5, 0.33"]),
    "a loss": (True, ["shape () for 2 samples", "such as a loss, belongs after the pipeline"]),
    "samples in another dimension": (True, ["shape (6, 2) for 2 samples"]),
    "what compares samples": (False, COMPARES),
    "a position for each sample": (False, COMPARES),
    "a parameter": (False, ["returns a tensor that no call has made"]),
    "a hidden module": (True, ["not registered"]),
    "autocast": (False, ["`with AUTOCAST:`", "it sets or asks for autocast"]),
    "a buffer that is replaced": (False, REPLACES),
    "hooks of saved tensors": (
        False,
        ["Do give something else than the module does: the gradient of a.weight"],
    ),
    "the default generator": (True, ["asks for a random state"]),
    "a transform": (True, ["torch.func transforms"]),
    "a size in a partial": (True, ["it passes functools.partial(<built-in method mul"]),
    "a size that is returned": (
        True,
        ["returns {'y': Tensor, 'n': 2}, {'y'", "return tensors alone"],
    ),
    "a shape that is returned": (True, ["or returns (Tensor, [torch.Size([2, 6])])"]),
    "a closure that is returned": (True, ["or returns (Tensor, <function"]),
    "an iterator that cannot be copied": (False, ["TypeError: cannot pickle 'generator' object"]),
    "a draw that is not noted": (True, ["asks for a random state"]),
}
OTHERS: dict[str, tuple[Callable[[], Any], bool, list[str]]] = {
    "a branch, in a submodule": (
        lambda: nn.Sequential(does(FORWARDS["a branch"])),
        True,
        ["whole=[Do]"],
    ),
    "a buffer that is replaced, in a submodule": (
        lambda: nn.Sequential(does(replacing)),
        False,
        REPLACES,
    ),
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
    "time before the batch": (
        lambda: does(
            lambda net, x: net.recurrent(x.unsqueeze(1))[0].squeeze(1),
            recurrent=nn.LSTM(WIDTH, WIDTH),
        ),
        False,
        COMPARES,
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.ReLU())),
        False,
        ["Sequential has a scripted part, '0'"],
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(2)),
        False,
        ["without shapes, such as in ''; run it once"],
    ),
    "a state of its own": (
        type("Extra", (traced.Residual,), {"get_extra_state": lambda _: torch.ones(1)}),
        False,
        ["_extra_state"],
    ),
}
CASES = OTHERS | {
    name: (
        partial(does, forward),
        *SAID.get(name, (True, [f"it sets or asks for {name},", "do that in a submodule"])),
    )
    for name, forward in FORWARDS.items()
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, with_line, said = CASES[name]
    module, sample = make(), rows()
    states = random_states()
    with pytest.raises(Untraceable) as caught:
        sequential(module, sample)
    assert states == random_states()
    message = str(caught.value)
    assert (f'`"{name.partition(",")[0]}": lambda' in message) == with_line
    assert [part for part in said if part not in message] == []
    freed = weakref.ref(module)
    del module, caught
    assert freed() is None or name.startswith("compiled")  # a module that refers to itself


def each_with_each(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the scores of every image with every text."""
    return net.a(x) @ net.b(y).t()


class Pairs(traced.Net):
    forward = each_with_each


def test_a_batched_tensor_is_not_taken_for_a_shared_one() -> None:
    """Micro-batches of both give other scores than micro-batches of one with all of the other."""
    sample = (rows(), rows())
    with pytest.raises(Untraceable, match=r"shape \(3, 3\) for 3 samples(?s:.*)shared=\[…\]"):
        sequential(Pairs(), sample)
    module = Pairs()
    for shared in (["y"], None):  # without it, where the lengths tell which has the batch
        x, y = sample if shared else (rows(), torch.randn(3, WIDTH))
        layers = sequential(module, (x, y), shared=shared)
        model = GPipe(layers, [len(layers)], devices=["cpu"], chunks=2)
        torch.testing.assert_close(model(x, y), module(x, y))


class Experts(nn.Module):
    """An expert takes no more rows than its capacity, and leaves the others as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.choice, self.expert = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        taken = self.choice(x).flatten().topk(1 + len(x) // 4).indices
        return x.index_add(0, taken, self.expert(x[taken]))


class OnlyTraining(traced.Net):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("there is nothing to evaluate")
        return self.b(self.a(x) - x.mean(0))


LET_BE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a norm without statistics": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)),
        {},
    ),
    "draws": (lambda: does(lambda net, x: net.a(nn.functional.dropout(x))), {}),
    "a capacity of experts": (
        lambda: nn.Sequential(nn.Linear(6, 6), Experts()),
        {"whole": [Experts]},
    ),
    "what is only for training": (lambda: nn.Sequential(OnlyTraining(), nn.Linear(6, 200)), {}),
}


@pytest.mark.parametrize("name", LET_BE)
def test_what_compares_samples_for_a_known_reason_is_let_be(name: str) -> None:
    make, options = LET_BE[name]
    assert len(sequential(make(), torch.randn(8, WIDTH), **options))


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


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: sequential(traced.Residual(), rows(7)),
            RuntimeError,
            r"cannot be multiplied \(5x7 and 6x6\)",
        ),
        (
            lambda: AUTOCAST(sequential(does(lambda net, x: net.b(x).to(net.a(x).dtype)), rows()))(
                rows()
            ),
            Untraceable,
            r"2, 3, 5, 5 \(training mode, torch.bfloat16 autocast\) samples it does not do the same",
        ),
        (
            lambda: sequential(traced.Residual(), rows(), shared=["y"]),
            ValueError,
            r"shared names \['y'\], but the tensors are in \['x'\]",
        ),
        (
            lambda: sequential(traced.Residual(), rows(), whole=[nn.Conv2d]),
            ValueError,
            "Residual has no submodule <class",
        ),
    ],
)
def test_misuse(act: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()
