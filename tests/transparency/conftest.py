"""Run a model plainly and as a pipeline, and compare all that a user can see.

`Plain` is the definition of what a pipeline computes. Everything is compared bit by bit unless a test gives a
tolerance and its reason: the same operators run on the same numbers, and a parameter's gradients are added up in the
same order, from the last micro-batch to the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

Tensors = Tensor | tuple[Tensor, ...]

WAYS = [
    {"engine": engine, "checkpoint": checkpoint}
    for engine in ("graph", "workers")
    for checkpoint in ("always", "except_last", "never")
]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way.values()))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every engine with every checkpoint mode, as keyword arguments of `GPipe`."""
    return dict(request.param)


@pytest.fixture(params=["graph", "workers"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the operators of tiny layers from waiting for threads of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


class Plain(nn.Module):
    """Run `layers` on each micro-batch in turn, in the calling thread, and concatenate the outputs."""

    def __init__(self, layers: nn.Sequential, chunks: int) -> None:
        super().__init__()
        self.layers = layers
        self.chunks = chunks

    def forward(self, value: Tensors) -> Tensors:
        parts = [self.layers(part) for part in self.split(value)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def split(self, value: Tensors) -> list[Any]:
        if isinstance(value, Tensor):
            return list(value.split(max(1, -(-len(value) // self.chunks))))
        return list(zip(*(self.split(x) for x in value), strict=True))


def tensors(value: Tensors) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def total(outputs: Tensors) -> Tensor:
    """Reduce everything that takes a gradient to a scalar, such that no two elements count alike."""
    return sum(
        ((y * y.conj()).real * torch.linspace(1, 2, y.numel(), dtype=y.real.dtype).reshape(y.shape)).sum()
        for y in tensors(outputs)
        if y.requires_grad
    )  # type: ignore[return-value]


def go_backward(outputs: Tensors) -> None:
    total(outputs).backward()


@dataclass
class Outcome:
    """What one step shows: tensors by name, `None` for a gradient that is not there."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    takes_grad: dict[str, bool] = field(default_factory=dict)


def observe(
    model: nn.Module,
    value: Tensors,
    backward: Callable[[Any], None] | None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Outcome:
    """Run a step of `model` on copies of the inputs, its forward within a context."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors(value))
    model.zero_grad()
    with within():
        outputs = model(inputs[0] if isinstance(value, Tensor) else inputs)
    named = {f"output {k}": y for k, y in enumerate(tensors(outputs))}
    if backward is not None:
        backward(outputs)
    layers = model.layers if isinstance(model, Plain) else model
    return Outcome(
        {name: y.detach() for name, y in named.items()},
        {f"input {k}": x.grad for k, x in enumerate(inputs)} | {n: p.grad for n, p in layers.named_parameters()},
        {name: b.clone() for name, b in layers.named_buffers()},
        {name: y.requires_grad for name, y in named.items()},
    )


def compare(piped: Outcome, plain: Outcome, tolerance: dict[str, float] | None = None) -> None:
    """Assert that two outcomes are the same, bit by bit where no tolerance is given."""
    for what in ("outputs", "gradients", "buffers"):
        ours, theirs = getattr(piped, what), getattr(plain, what)
        assert ours.keys() == theirs.keys(), what
        for name, y in theirs.items():
            x = ours[name]
            assert (x is None) == (y is None), f"{what}: {name} is {x}, but should be {y}"
            if y is not None:
                torch.testing.assert_close(x, y, **(tolerance or {"rtol": 0, "atol": 0}), msg=_named(what, name))
    for name, needed in plain.takes_grad.items():
        assert piped.takes_grad[name] or not needed, f"{name} takes no gradient, but should"


def _named(what: str, name: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {name}: {message}"


def transparent(
    layers: Callable[[], nn.Sequential],
    value: Tensors,
    balance: list[int],
    *,
    chunks: int = 3,
    backward: Callable[[Any], None] | None = go_backward,
    tolerance: dict[str, float] | None = None,
    prepare: Callable[[nn.Sequential], object] | None = None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    plain_within: Callable[[], AbstractContextManager[object]] | None = None,
    steps: int = 1,
    **options: Any,
) -> Outcome:
    """Assert that a pipeline of `layers()` equals `Plain`, in each of some steps; return the last outcome.

    `prepare` is done to the layers first; the forwards run `within` a context, the plain one in its own if given.
    """
    module = layers()
    if prepare is not None:
        prepare(module)
    plain = Plain(copy.deepcopy(module), chunks)
    piped = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=chunks, **options)
    for _ in range(steps):
        outcome = observe(piped, value, backward, within)
        compare(outcome, observe(plain, value, backward, plain_within or within), tolerance)
    return outcome


@pytest.fixture(scope="session")
def equals_plain() -> Callable[..., Outcome]:
    """`transparent`, for tests; a fixture since test modules cannot import from each other."""
    return transparent


@pytest.fixture(scope="session")
def plainly() -> type[Plain]:
    """`Plain`, for tests that compare on their own."""
    return Plain


@pytest.fixture(scope="session")
def loss_of() -> Callable[[Tensors], Tensor]:
    """`total`, for tests that go backward on their own."""
    return total
