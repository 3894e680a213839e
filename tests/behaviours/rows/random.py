"""Random numbers: a recomputation draws what its forward drew, and a pipeline that draws nothing takes nothing.

`Draw` (../draw.py) writes down what first passes drew, and the plain layers take the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compare import REORDERED
from ..parts.draw import Draw, drawing, dropout
from ..parts.layers import linear, made
from ..row import Row, step, steps

Drawn = Callable[[Tensor], Tensor]


def attention(x: Tensor, dropout: float) -> Tensor:
    q = x[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)[0]


DRAWS: dict[str, Drawn] = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout in place": lambda x: F.dropout(torch.ones_like(x), 0.5, inplace=True),
    "normal": lambda x: torch.normal(torch.ones_like(x), 0.5),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 4, replacement=True).float(),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(),
    "gamma": lambda x: torch.distributions.Gamma(torch.full_like(x, 2), torch.ones_like(x)).rsample(),
    "randint": lambda x: torch.randint(100, x.shape).float(),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, x.shape),
    "exponential in place": lambda x: torch.empty_like(x).exponential_(),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), torch.full_like(x, 0.5)),
    "dirichlet": lambda x: torch._sample_dirichlet(torch.ones_like(x)),
    "attention with dropout": lambda x: attention(x.detach(), 0.5),
    "initialization": lambda x: nn.Linear(4, len(x)).weight.detach(),
    "several": lambda x: torch.rand_like(x) * torch.randperm(4) + F.dropout(torch.ones_like(x)),
}


def layers(draw: Drawn = DRAWS["uniform in place"]) -> nn.Sequential:
    return nn.Sequential(linear(), Draw(draw), nn.Tanh(), Draw(draw), linear())


def alone(layer: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return layers of which only one may draw: that of the second partition."""
    return made(linear, nn.Tanh, layer, nn.Tanh, linear)


def assert_apart(run: nn.Module) -> None:
    """Assert that no two tasks of a pipeline have drawn the same."""
    drawn = [x for layer in drawing(run) for x in layer.first]
    if not any(layer.recorded for layer in drawing(run)):
        assert not any(x.equal(y) for k, x in enumerate(drawn) for y in drawn[:k]), "two tasks drew the same"


def all_differ(run: nn.Module, x: Tensor) -> Any:
    """Run a step; no two micro-batches, and no two partitions, have drawn the same."""
    shown = step(run, x)
    assert_apart(run)
    return shown


def under_way(run: nn.Module, x: Tensor) -> Any:
    """Mini-batches that are under way at once draw different numbers."""
    outputs = [run(x), run(x)]
    for y in outputs:
        y.sum().backward()
    assert_apart(run)
    return [y.detach() for y in outputs]


def leaves_the_callers_numbers_alone(run: nn.Module, x: Tensor) -> bool:
    y = run(x)
    before = torch.get_rng_state()
    y.sum().backward()
    return torch.equal(torch.get_rng_state(), before)


def takes_nothing(run: nn.Module, x: Tensor) -> list[bool]:
    found = []
    for _ in range(2):
        before = torch.get_rng_state()
        step(run, x)
        found.append(torch.equal(torch.get_rng_state(), before))
    return found


class Own(nn.Module):
    """Draw from a generator of its own, or from one that it shares."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator or torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * dropout(x, self.generator)


def of_two_partitions() -> nn.Sequential:
    one = torch.Generator()
    return nn.Sequential(Own(one), linear(), Own(one))


def from_evaluation_and_back(run: nn.Module, x: Tensor) -> Any:
    return [step(run.train(mode), x) for mode in (False, True, False, True, True)]


def sizes(run: nn.Module, x: Tensor) -> Any:
    """A single sample goes through another engine, with random numbers of its own."""
    return [(step(run, x[:size]), [p.grad for p in run.parameters()]) for size in (1, 8, 1, 1, 8, 8, 3)]


def sometimes(x: Tensor) -> Tensor:
    """A worker finds out from the first micro-batch whether its layers draw; where it was wrong, it says so."""
    return torch.rand_like(x) if x.detach()[0, 0] > 5 else torch.ones_like(x)


# What draws nothing, though PyTorch marks some of its operators as random.
QUIET: dict[str, Callable[[], Any]] = {
    "nothing": nn.Identity,
    "dropout in evaluation": lambda: nn.Dropout().eval(),
    "attention without dropout": lambda: lambda x: attention(x, 0.0),
    "a generator of the layer's own": lambda: lambda x: x * torch.rand(4, generator=torch.Generator().manual_seed(1)),
}


def rising() -> Tensor:
    return torch.arange(8.0).unsqueeze(1).expand(8, 4).clone()


WRONG = "in a later micro-batch, but not in the first one"
WITHIN = r"within torch\.utils\.checkpoint"
AUTO: dict[str, Any] = {"options": {"engine": "auto"}, "without": {"ranks": "they are one engine"}}
MORE: dict[str, Any] = {"chunks": 4, "balance": (2, 1, 2)}
ONE = "one torch.Generator"

ROWS = [
    *(Row(what, partial(layers, draw), use=all_differ, **MORE) for what, draw in DRAWS.items()),
    Row("several steps", layers, use=steps, **MORE),
    Row("backward leaves the caller's numbers alone", layers, use=leaves_the_callers_numbers_alone, **MORE),
    Row("two forwards, then two backwards", layers, use=under_way, **MORE, tolerance=REORDERED),
    *(Row(f"no numbers are taken by {what}", alone(layer), use=takes_nothing, **MORE)
      for what, layer in QUIET.items()),
    Row("one partition draws the numbers of a plain run", made(linear, nn.Dropout, linear), balance=(3,), use=steps),
    Row("one micro-batch draws the numbers of a plain run", made(linear, nn.Dropout, linear),
        use=steps, chunks=1),
    Row("from evaluation to training and back", layers, use=from_evaluation_and_back, **MORE),
    Row("from evaluation to training, any engine", layers, use=from_evaluation_and_back, **MORE, **AUTO),
    Row("sizes", layers, use=sizes, **MORE),
    Row("sizes, any engine", layers, use=sizes, **MORE, **AUTO),
    Row("a first draw in a later micro-batch", made(lambda: Draw(sometimes), linear, *[nn.Tanh] * 3), rising,
        refused={"workers always": WRONG, "ranks always": WRONG}, **MORE),
    Row("a generator of a layer's own", alone(Own), use=steps, **MORE),
    Row("a generator of two partitions", of_two_partitions, refused={"": ONE}, balance=(1, 1, 1)),
    Row("within plain checkpointing", alone(lambda: Draw(use_reentrant=False)),
        refused={"workers": WITHIN}, **MORE),
    Row("within plain checkpointing, reentrant", alone(lambda: Draw(use_reentrant=True)),
        refused={"workers": WITHIN}, **MORE, without={"ranks": "tested by autograd.grad, which that kind refuses"}),
]  # fmt: skip
