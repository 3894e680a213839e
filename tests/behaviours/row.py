"""`Row`, a behaviour: something that is done with a small model. `unlike` does it with a pipeline and with `Plain`."""

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
from .parts.draw import check_redraws, reuse_draws
from .parts.layers import WIDTH, five, real

ENGINES = ("graph", "workers", "ranks")
"""The engines that rows run on. To add an engine or a schedule, add a name here that `piped` knows."""

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
    """Reduce all outputs that require grad to a scalar, with a different weight for each element."""

    def one(y: Tensor) -> Tensor:
        counts = torch.linspace(1, 2, y.numel(), dtype=y.real.dtype, device=y.device)
        return ((y * y.conj()).real * counts.reshape(y.shape)).sum()

    return sum(one(y) for y in tensors(outputs) if y.requires_grad)  # type: ignore[return-value]


def step(run: nn.Module, value: Tensors, loss: Callable[[Any], Tensor] = total) -> list[Tensor]:
    """Run forward and backward; return copies of the outputs from before that, which take gradients as they do."""
    run.zero_grad()
    outputs = run(value)
    shown = [y.detach().clone().requires_grad_(y.requires_grad) for y in tensors(outputs)]
    if any(y.requires_grad for y in tensors(outputs)):
        loss(outputs).backward()
    return shown


def steps(run: nn.Module, value: Tensors) -> list[list[Tensor]]:
    return [step(run, value) for _ in range(3)]


def loss_of(run: nn.Module, x: Tensor | None = None) -> Tensor:
    y: Tensor = run(torch.randn(8, WIDTH) if x is None else x)
    return y.square().sum()


def amid(change: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor], list[Tensor | None]]:
    """Change something between forward and backward; return the gradients of what were the parameters before."""

    def use(run: Any, x: Tensor) -> list[Tensor | None]:
        parameters, loss = [*run.parameters()], loss_of(run, x)
        change(run, x)
        loss.backward()
        return [p.grad for p in parameters]

    return use


@dataclass(frozen=True, eq=False)
class Row:
    """A behaviour.

    Args:
        layers: make the model.
        given: make the input.
        balance: layers per partition; by default, each of the last two layers is a partition.
        use: a function of model and input. Its result must be the same with a pipeline, and so must input, parameters,
            gradients and buffers afterwards.
        refused: pattern of the error that is raised instead, by engine, mode, both, or `""` for all.
        without: engines, modes and variations that the row does not run with, and the reason for each.
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
        """Return the pattern of the expected error, or `None` if none is expected."""
        return next(
            (
                self.refused[k]
                for k in (f"{engine} {checkpoint}", engine, checkpoint, "")
                if k in self.refused
            ),
            None,
        )

    def left_out(self, variation: str, engine: str, checkpoint: str) -> bool:
        """Whether to skip this. Rows with refusals have no variations: a refusal may depend on boundaries."""
        return bool({engine, checkpoint, variation} & {*self.without}) or bool(
            variation and self.refused
        )


class Case(NamedTuple):
    """A row with a variation, on an engine, in a mode."""

    row: Row
    variation: str
    engine: str
    checkpoint: str


def cases(rows: Sequence[Row], *, pairs: bool) -> list[Case]:
    """Return a few cases of each row, with every variation, engine and mode, or with `pairs` every pair of these."""
    found = []
    for r, row in enumerate(rows):
        ways = [way for way in product(VARIATIONS, ENGINES, MODES) if not row.left_out(*way)]
        ways = [
            ways[(k + 7 * r) % len(ways)] for k in range(len(ways))
        ]  # so that rows get different combinations
        chosen = covering([dict(enumerate(way)) for way in ways], size=2 if pairs else 1)
        found += [Case(row, *ways[k]) for k in sorted(chosen)]
    return found


def made(row: Row) -> tuple[nn.Sequential, Any]:
    """Return the model and the input of a row, the same each time."""
    torch.manual_seed(0)
    return row.layers(), row.given()


def unlike(
    row: Row, variation: str, engine: str, checkpoint: str, devices: Sequence[str] = ("cpu",)
) -> list[str]:
    """Return the differences of a pipeline from plain layers; if it must refuse, the gradients that it left.

    Partitions are placed on the devices in turn, the plain layers on the first.
    """
    with nullcontext() if devices[0] == "cpu" else torch.device(devices[0]):
        layers, value = made(row)
        again, twin = made(row)
    options: dict[str, Any] = {
        "chunks": row.chunks,
        "engine": engine,
        "checkpoint": checkpoint,
        **row.options,
    }
    options |= {"devices": devices, "balance": row.balance or (len(layers) - 2, 1, 1)} | VARIATIONS[
        variation
    ]
    observer, balance = options.pop("observer", None), options.pop("balance") or (len(layers),)
    plain = Plain(
        again, chunks=options["chunks"], deferred_batch_norm="deferred_batch_norm" in options
    )
    if refusal := row.refusal(engine, checkpoint):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=refusal):
            row.use(piped(layers, balance, **options), value)
        return [
            f"a gradient of {name}" for name, p in layers.named_parameters() if p.grad is not None
        ]
    model = piped(layers, balance, **options)
    model.observer = observer
    torch.manual_seed(1)
    ours = row.use(model, value)
    reuse_draws(model, plain)
    check_redraws(model)
    torch.manual_seed(1)
    return differences((ours, model, value), (row.use(plain, twin), plain, twin), row.tolerance)
