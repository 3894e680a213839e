"""`Row`, a test case that has a small model and a function that uses this model.

`unlike` runs a test case. It calls the function twice, with a pipeline of the model and with the
model's layers without a pipeline (`Plain`), and compares the results.
"""

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
from .parts.draw import assert_drawn_again, reuse_draws
from .parts.layers import WIDTH, five, real

ENGINES = ("graph", "workers", "ranks")
"""The engines with which each test case runs. To add one, add a name that `piped` knows."""

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
    """Return a scalar loss: a weighted sum of squares of all outputs that require grad."""
    result: Any = 0
    for y in tensors(outputs):
        if y.requires_grad:
            weights = torch.linspace(1, 2, y.numel(), dtype=y.real.dtype, device=y.device)
            squares = (y * y.conj()).real
            result = result + (squares * weights.reshape(y.shape)).sum()
    return result


def step(run: nn.Module, value: Tensors, loss: Callable[[Any], Tensor] = total) -> list[Tensor]:
    """Run forward and backward, and return copies of the outputs.

    The outputs are copied before backward. A copy requires grad if its output does.
    """
    run.zero_grad()
    outputs = run(value)
    shown = []
    for y in tensors(outputs):
        copy = y.detach().clone()
        shown.append(copy.requires_grad_(y.requires_grad))
    if any(y.requires_grad for y in shown):
        loss(outputs).backward()
    return shown


def steps(run: nn.Module, value: Tensors) -> list[list[Tensor]]:
    return [step(run, value) for _ in range(3)]


def loss_of(run: nn.Module, x: Tensor | None = None) -> Tensor:
    if x is None:
        x = torch.randn(8, WIDTH)
    y: Tensor = run(x)
    return y.square().sum()


def amid(change: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor], list[Tensor | None]]:
    """Return a function that runs a model, and calls `change` between forward and backward.

    The returned function takes a model and its input. `change` gets the same two arguments. The
    function returns the gradients of the parameters that the model had before the change.
    """

    def use(run: Any, x: Tensor) -> list[Tensor | None]:
        parameters = [*run.parameters()]
        loss = loss_of(run, x)
        change(run, x)
        loss.backward()
        return [p.grad for p in parameters]

    return use


@dataclass(frozen=True, eq=False)
class Row:
    """A test case: a use of a small model, with a pipeline and with plain layers (no pipeline).

    Args:
        name: The name of the behaviour.
        layers: A function that builds the model.
        given: A function that makes the input.
        balance: The number of layers in each partition. By default, each of the last two layers is
            a partition.
        use: A function of model and input. With a pipeline and with plain layers, it must return
            equal results, and leave equal inputs, parameters, gradients and buffers.
        refused: Patterns of the errors that pipelines must raise instead. The keys say which
            pipelines: an engine, a mode of checkpointing, both ("graph always"), or `""` for all.
        without: Maps what is not tested to the reason. A key is an engine, a mode of checkpointing,
            or a variation such as "one partition" (a key of `VARIATIONS`).
        tolerance: The tolerance, as in compare.py. A comment at the test case gives the reason.
        chunks: The number of micro-batches.
        options: Further options of the pipeline.
        note: What users need to know. docs/works-with.md lists the test cases with a note.
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

    def refusal(self, engine: str, checkpoint: str) -> str:
        """Return the pattern of the error that a pipeline must raise, or "" if it must not."""
        for key in (f"{engine} {checkpoint}", engine, checkpoint, ""):
            if key in self.refused:
                return self.refused[key]
        return ""

    def left_out(self, variation: str, engine: str, checkpoint: str) -> bool:
        """Return whether this combination of variation, engine and mode is not tested.

        A test case that expects an error is tested without variations (changes such as a single
        partition). With a single partition, there may be no error, because there is no boundary
        between partitions.
        """
        if variation and self.refused:
            return True
        return not {engine, checkpoint, variation}.isdisjoint(self.without)


def three(name: str, layers: Callable[[], nn.Sequential], **options: Any) -> Row:
    """Return a test case with three layers in two partitions: two layers, and the last one."""
    return Row(name, layers, balance=(2, 1), **options)


def but_never(message: str) -> dict[str, str]:
    """Return a value for `Row.refused` that expects an error in all modes but "never".

    In the other modes of checkpointing, "always" and "except_last", partitions are recomputed.
    """
    return {"always": message, "except_last": message}


def but_graph_never(message: str) -> dict[str, str]:
    """Return a value for `Row.refused` that expects an error if each task has its own graph.

    Each task has its own autograd graph, with one exception: with the engine "graph" in the
    checkpointing mode "never", the whole mini-batch has one graph.
    """
    return {"graph never": "", "": message}


class Case(NamedTuple):
    """A test case (`Row`) with one engine, one mode of checkpointing, and one variation.

    A variation changes the pipeline, for example to a single partition (see `VARIATIONS`).
    """

    row: Row
    variation: str
    engine: str
    checkpoint: str


def cases(rows: Sequence[Row], *, pairs: bool) -> list[Case]:
    """Choose for each test case a few combinations of variation, engine and mode of checkpointing.

    A variation changes the pipeline, for example to a single partition. To run all combinations
    would take too long. Each variation, each engine and each mode occurs in at least one chosen
    combination, and with `pairs` also each pair of an engine and a mode. Different test cases get
    different combinations.
    """
    found = []
    for r, row in enumerate(rows):
        ways = [way for way in product(VARIATIONS, ENGINES, MODES) if not row.left_out(*way)]
        start = 7 * r % len(ways)  # so that rows get different combinations
        ways = ways[start:] + ways[:start]
        numbered = []
        for variation, engine, checkpoint in ways:
            together = (engine, checkpoint) if pairs else engine
            numbered.append({"variation": variation, "engine": together, "mode": checkpoint})
        chosen = covering(numbered, size=1)
        for k in sorted(chosen):
            variation, engine, checkpoint = ways[k]
            found.append(Case(row, variation, engine, checkpoint))
    return found


def made(row: Row) -> tuple[nn.Sequential, Any]:
    """Make the model and the input of a test case, which have the same values in each call."""
    torch.manual_seed(0)
    return row.layers(), row.given()


def unlike(
    row: Row, variation: str, engine: str, checkpoint: str, devices: Sequence[str] = ("cpu",)
) -> list[str]:
    """Run a test case with a pipeline and with plain layers. Return a list of the differences.

    If the pipeline must raise an error, the list names the gradients that exist after the error.
    There should be none.

    Args:
        row: The test case.
        variation: The change to the pipeline, a key of `VARIATIONS`, or "" for no change.
        engine: The engine.
        checkpoint: The mode of checkpointing.
        devices: The devices, used for the partitions in turn. The plain layers are on the first.
    """
    with nullcontext() if devices[0] == "cpu" else torch.device(devices[0]):
        layers, value = made(row)
        again, twin = made(row)
    options: dict[str, Any] = {
        "chunks": row.chunks,
        "engine": engine,
        "checkpoint": checkpoint,
        **row.options,
        "devices": devices,
        "balance": row.balance or (len(layers) - 2, 1, 1),
        **VARIATIONS[variation],
    }
    observer = options.pop("observer", None)
    balance = options.pop("balance") or (len(layers),)
    if refusal := row.refusal(engine, checkpoint):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=refusal):
            row.use(piped(layers, balance, **options), value)
        parameters = layers.named_parameters()
        return [f"a gradient of {name}" for name, p in parameters if p.grad is not None]
    deferred = "deferred_batch_norm" in options
    plain = Plain(again, chunks=options["chunks"], deferred_batch_norm=deferred)
    model = piped(layers, balance, **options)
    model.observer = observer
    torch.manual_seed(1)
    ours = row.use(model, value)
    reuse_draws(model, plain)
    assert_drawn_again(model)
    torch.manual_seed(1)
    expected = row.use(plain, twin)
    return differences((ours, model, value), (expected, plain, twin), row.tolerance)
