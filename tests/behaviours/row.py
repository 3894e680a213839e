"""A behaviour, `Row`: what is done with a small model. `check` does it with a pipeline and with `Plain`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ..conftest import covering
from ..plain import Plain, Tensors, piped
from .compare import differences
from .parts.draw import forget, replay
from .parts.layers import five, real

ENGINES = ("graph", "workers", "ranks")
"""What rows run on. A new engine, or another schedule, is one more name here that `piped` knows."""

MODES = ("always", "except_last", "never")
VARIATIONS: dict[str, dict[str, Any]] = {
    "": {},
    "one micro-batch": {"chunks": 1},
    "one partition": {"balance": ()},
    "observed": {"observer": nullcontext},
}


def tensors(value: Tensors) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def total(outputs: Tensors) -> Tensor:
    """Reduce everything that takes a gradient to a scalar, such that no two elements count alike."""

    def one(y: Tensor) -> Tensor:
        counts = torch.linspace(1, 2, y.numel(), dtype=y.real.dtype, device=y.device)
        return ((y * y.conj()).real * counts.reshape(y.shape)).sum()

    return sum(one(y) for y in tensors(outputs) if y.requires_grad)  # type: ignore[return-value]


def step(run: nn.Module, value: Tensors, loss: Callable[[Any], Tensor] = total) -> list[Tensor]:
    """Run forward and backward; return the outputs as they were before."""
    run.zero_grad()
    outputs = run(value)
    shown = [y.detach().clone().requires_grad_(y.requires_grad) for y in tensors(outputs)]
    if any(y.requires_grad for y in tensors(outputs)):
        loss(outputs).backward()
    return shown


def steps(run: nn.Module, value: Tensors) -> list[list[Tensor]]:
    return [step(run, value) for _ in range(3)]


def promised(run: nn.Module, value: Tensors) -> Any:
    """Run a step, and say which outputs take a gradient: exactly those that take one without a pipeline."""
    outputs = step(run, value)
    return outputs, [y.requires_grad for y in outputs]


@dataclass(frozen=True, eq=False)
class Row:
    """A behaviour.

    Args:
        layers: make the model.
        given: make the input.
        balance: layers per partition; without it, the last two layers have partitions of their own.
        use: what is done with the model and the input. What it returns must be the same with a pipeline, as must
            input, parameters, gradients and buffers be afterwards.
        refused: what is raised instead, by engine, mode, both, or (`""`) in any case.
        without: the engines, modes and variations that cannot do it, each with the reason.
        tolerance: see compare.py; with a reason beside the row.
        options: of the pipeline, as its user would give them.
        note: what users should know; rows that have one are in docs/works-with.md.
    """

    name: str
    layers: Callable[[], nn.Sequential] = five
    given: Callable[[], Any] = real
    balance: Sequence[int] | None = None
    use: Callable[[Any, Any], Any] = step
    refused: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    chunks: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def refusal(self, engine: str, checkpoint: str) -> str | None:
        """Return the message of the error that is raised, or `None` where none is."""
        return next(
            (self.refused[k] for k in (f"{engine} {checkpoint}", engine, checkpoint, "") if k in self.refused), None
        )

    def left_out(self, variation: str, engine: str, checkpoint: str) -> bool:
        """Whether this is not to be run. A refusal may depend on where boundaries are."""
        return bool({engine, checkpoint, variation} & {*self.without}) or bool(variation and self.refused)


class Case(NamedTuple):
    """A row with a variation, on an engine, in a mode."""

    row: Row
    variation: str
    engine: str
    checkpoint: str


def cases(rows: Sequence[Row], *, pairs: bool) -> list[Case]:
    """Return a few cases of each row: each variation, engine and mode, or, with `pairs`, each pair of them."""
    found = []
    for r, row in enumerate(rows):
        ways = [way for way in product(VARIATIONS, ENGINES, MODES) if not row.left_out(*way)]
        ways = [ways[(k + 7 * r) % len(ways)] for k in range(len(ways))]  # so that each row has others
        chosen = covering([dict(enumerate(way)) for way in ways], size=2 if pairs else 1)
        found += [Case(row, *ways[k]) for k in sorted(chosen)]
    return found


def made(row: Row) -> tuple[nn.Sequential, Any]:
    """Return the model and the input of a row, the same each time."""
    torch.manual_seed(0)
    return row.layers(), row.given()


def unlike(row: Row, variation: str, engine: str, checkpoint: str, devices: Sequence[str] = ("cpu",)) -> list[str]:
    """Return in what a pipeline differs from plain layers; or, where it has to refuse, which gradients it left.

    Partitions are on these devices in turn, and the plain layers on the first.
    """
    with nullcontext() if devices[0] == "cpu" else torch.device(devices[0]):
        layers, value = made(row)
        again, twin = made(row)
    options: dict[str, Any] = {"chunks": row.chunks, "engine": engine, "checkpoint": checkpoint, **row.options}
    options |= {"devices": devices, "balance": row.balance or (len(layers) - 2, 1, 1)} | VARIATIONS[variation]
    observer, balance = options.pop("observer", None), options.pop("balance") or (len(layers),)
    plain = Plain(again, chunks=options["chunks"], deferred_batch_norm="deferred_batch_norm" in options)
    if refusal := row.refusal(engine, checkpoint):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=refusal):
            row.use(piped(layers, balance, **options), value)
        return [f"a gradient of {name}" for name, p in layers.named_parameters() if p.grad is not None]
    model = piped(layers, balance, **options)
    model.observer = observer
    torch.manual_seed(1)
    ours = row.use(model, value)
    replay(model, plain)
    forget(model)
    torch.manual_seed(1)
    return differences((ours, model, value), (row.use(plain, twin), plain, twin), row.tolerance)
