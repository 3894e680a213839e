"""Run layers plainly and as a pipeline, and assert that all that a user can see is the same.

Everything is compared bit by bit unless a test gives a tolerance and its reason: the same operators run on the same
numbers, and a parameter's gradients are added up in the same order, from the last micro-batch to the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import GPipe

from ..plain import Plain, Tensors, piped

Tolerance = dict[str, Any]
EXACT: Tolerance = {"rtol": 0.0, "atol": 0.0}
# A sum of gradients that is added up in another order: float32 has 24 bits, and the terms are of order 100 at most.
REORDERED: Tolerance = {"rtol": 1e-5, "atol": 1e-4}


def both(layers: nn.Sequential, balance: Sequence[int], chunks: int = 3, **options: Any) -> tuple[Plain, GPipe]:
    """Return the plain model and the pipeline of some layers, of equal but separate parameters."""
    return Plain(copy.deepcopy(layers), chunks=chunks), piped(layers, balance, chunks, **options)


def assert_same_use(
    use: Callable[[Any], Any],
    layers: nn.Sequential,
    balance: Sequence[int],
    *,
    tolerance: Tolerance = EXACT,
    **options: Any,
) -> None:
    """Assert that `use` returns the same, and leaves the same state, of the plain model and of the pipeline.

    Random numbers start alike in both.
    """
    found = []
    for run in both(layers, balance, **options):
        torch.manual_seed(1)
        found.append([use(run), state(run)])
    plain, ours = found
    assert_close(ours, plain, **tolerance)


def state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, gradients and buffers by name."""
    return {
        "parameters": dict(model.named_parameters()),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def tensors(value: Tensors) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def total(outputs: Tensors) -> Tensor:
    """Reduce everything that takes a gradient to a scalar, such that no two elements count alike."""

    def one(y: Tensor) -> Tensor:
        counts = torch.linspace(1, 2, y.numel(), dtype=y.real.dtype, device=y.device)
        return ((y * y.conj()).real * counts.reshape(y.shape)).sum()

    return sum(one(y) for y in tensors(outputs) if y.requires_grad)  # type: ignore[return-value]


def go_backward(outputs: Tensors) -> None:
    if any(y.requires_grad for y in tensors(outputs)):
        total(outputs).backward()


@dataclass
class Outcome:
    """What one step shows: outputs in their order, the rest by name, `None` for a gradient that is not there."""

    outputs: list[Tensor]
    takes_grad: list[bool]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def observe(
    model: nn.Module,
    value: Tensors,
    backward: Callable[[Any], None] = go_backward,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Outcome:
    """Run a step of `model` on copies of the inputs, its forward within a context."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors(value))
    model.zero_grad()
    with within():
        outputs = model(inputs[0] if isinstance(value, Tensor) else inputs)
    shown = [y.detach() for y in tensors(outputs)]
    takes_grad = [y.requires_grad for y in tensors(outputs)]
    backward(outputs)
    gradients = {f"input {k}": x.grad for k, x in enumerate(inputs)} | state(model)["gradients"]
    return Outcome(shown, takes_grad, gradients, {name: b.clone() for name, b in model.named_buffers()})


def assert_same_outcome(ours: Outcome, plain: Outcome, tolerance: Tolerance = EXACT) -> None:
    """Assert that two outcomes are the same, bit by bit unless a tolerance is given."""
    found = [{key: x for key, x in vars(outcome).items() if key != "takes_grad"} for outcome in (ours, plain)]
    assert_close(*found, check_device=False, **tolerance)  # a pipeline's last layers may be on another one
    assert all(takes or not needed for takes, needed in zip(ours.takes_grad, plain.takes_grad, strict=True))


def assert_transparent(
    layers: nn.Sequential,
    value: Tensors,
    balance: Sequence[int],
    *,
    backward: Callable[[Any], None] = go_backward,
    tolerance: Tolerance = EXACT,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    steps: int = 1,
    **options: Any,
) -> Outcome:
    """Assert that a pipeline of `layers` equals `Plain`, in each of some steps; return the last outcome."""
    plain, model = both(layers, balance, **options)
    for _ in range(steps):
        outcome = observe(model, value, backward, within)
        assert_same_outcome(outcome, observe(plain, value, backward, within), tolerance)
    return outcome
