"""Check that predicted bytes equal the live bytes of a real pipeline on `meta` devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    GELU,
    BatchNorm1d,
    Dropout,
    Identity,
    LayerNorm,
    Linear,
    Module,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
    Tanh,
    TransformerEncoderLayer,
)

from reproduce.models.built import unet
from torchgpipe import GPipe
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.live import Live
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.tensors.observe import Task

from ....behaviours.parts.kinds import KINDS
from ....behaviours.parts.layers import WIDTH, Do, freeze
from ....parts import OPTIMIZERS
from .real_peaks import Copies, OnMeta, real_peaks


@cache
def counted(build: Callable[[], Sequential], shape: tuple[int, ...]) -> Counts:
    return count(build(), torch.empty(shape))


def mixed() -> Sequential:
    inner = Sequential(Linear(64, 32), Tanh(), Linear(32, 64))
    return Sequential(
        Linear(8, 64),
        BatchNorm1d(64),
        ReLU(),
        Linear(64, 64),
        inner,
        LayerNorm(64),
        GELU(),
        Linear(64, 100),
    )


def wide() -> Sequential:
    """Return a model whose layers have parameters of very different sizes."""
    return Sequential(
        Linear(8, 200, bias=False),
        Linear(200, 100),
        ReLU(),
        Linear(100, 300, bias=False),
        Linear(300, 100, bias=False),
        BatchNorm1d(100),
        Linear(100, 4),
    )


def twice() -> Sequential:
    """Return a model with layers of four kinds, two of each kind in a row.

    The kinds differ in what they save for backward: their output, their input, or nothing.
    """
    layers: list[Module] = []
    for kind in (ReLU, Sigmoid, Identity, lambda: BatchNorm1d(8)):
        layers += [kind(), kind()]
    return Sequential(Linear(8, 8), *layers, Linear(8, 8))


def in_place() -> Sequential:
    return Sequential(
        Linear(8, 32),
        Identity(),
        Dropout(inplace=True),
        ReLU(inplace=True),
        Linear(32, 32),
        ReLU(inplace=True),
    )


def pairs() -> Sequential:
    """Return a model in which some layers take and return pairs of tensors."""
    kinds = ("linear", "and its input", "swap", "swap", "sum", "linear")
    return Sequential(*[KINDS[kind](None) for kind in kinds])


def weighted(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], Sequential]:
    """Return a function that makes three layers. The middle one uses a parameter, `w`.

    The middle layer calls `function(layer, input)`. Autograd stores the gradient that it computes
    for `w` as `w.grad`, or a copy of it if something else still refers to the gradient.
    """
    return lambda: Sequential(Linear(8, 8), Do(function, w=Parameter(torch.empty(8))), Linear(8, 8))


def by_a_view(it: Any, x: Tensor) -> Tensor:
    """Use the layer's parameter `w` so that autograd computes its gradient as a view."""
    return (x.sum(0).cos() + it.w.view(2, 4).view(8)) * x


def by_a_copy(it: Any, x: Tensor) -> Tensor:
    """Use the layer's parameter `w` so that autograd stores a copy of its gradient."""
    return (x.sin().sum(0) + it.w).cos() + x


# In the last one of these balances, the partition on device 1 has no parameters to update.
OF_WIDE = [[7], [2, 3, 2], [2, 1, 1, 3], [2, 1, 4]]
# Each row has a function that makes a model, the shape of the model's input, and a list of balances
# to try. Rows with few samples test the update of the parameters, in which the memory peak then is.
CASES: list[tuple[Callable[[], Sequential], tuple[int, ...], list[list[int]]]] = [
    (mixed, (24, 8), [[8], [3, 5], [1, 1, 6]]),
    (partial(freeze, mixed, 3), (24, 8), [[3, 5]]),
    (in_place, (24, 8), [[6], [1, 5], [1, 3, 2]]),
    (lambda: unet(2, 1, 4), (8, 3, 16, 16), [[29], [10, 19], [6, 10, 13]]),
    (weighted(by_a_view), (24, 8), [[3], [1, 1, 1]]),
    (weighted(by_a_copy), (24, 8), [[3], [1, 1, 1]]),
    (wide, (8, 8), OF_WIDE),
    (wide, (4000, 8), [[3, 4]]),
    (partial(freeze, wide, 3), (8, 8), [[3, 4]]),
    (pairs, (24, WIDTH), [[6], [2, 4], [3, 2, 1]]),
    (twice, (24, 8), [[10], [3, 7], [2, 6, 2]]),
]
ROWS: list[tuple[Callable[[], Sequential], tuple[int, ...], list[int]]] = []
for _build, _shape, _balances in CASES:
    ROWS += [(_build, _shape, balance) for balance in _balances]


# They keep as many tensors as RMSprop and Adam do.
MORE_OPTIMIZERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("momentum", "adamw")]


@pytest.mark.quick(12)
@pytest.mark.parametrize("zeroed", [False, True], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adagrad", "adam", *MORE_OPTIMIZERS])
@pytest.mark.parametrize(("build", "shape", "balance"), ROWS)
def test_as_counted_on_a_real_run(
    build: Any,
    shape: Any,
    balance: list[int],
    name: str,
    foreach: bool,
    chunks: int,
    checkpoint: Any,
    zeroed: bool,
) -> None:
    samples = shape[0]
    rule = optimizer_named(name, foreach=foreach)
    setup = Setup(samples, tuple(balance), chunks, checkpoint, rule, zeroed=zeroed)
    kind: Any = OPTIMIZERS[name]
    make = partial(kind, lr=0.1, foreach=foreach)

    predicted = setup_memory(counted(build, shape), setup)

    x = torch.empty(shape)
    real = real_peaks(build(), x, balance, chunks, checkpoint, make, zeroed=zeroed)
    assert [device.peak for device in predicted] == real


def test_an_output_that_its_layer_saves_counts_twice() -> None:
    """Check that a tensor counts twice if it is the output and its layer saves it for backward.

    In a real run, the output and the saved tensor share one storage. The prediction is higher by
    this size, because it counts them as two tensors.
    """
    model = Sequential(Linear(6, 6), ReLU())
    x = torch.empty(12, 6)
    (predicted,) = setup_memory(count(model, x), Setup(12, (2,), 1, "never"))
    make = partial(torch.optim.SGD, lr=0.1, foreach=False)
    (real,) = real_peaks(model, x, [2], 1, "never", make)
    assert real < predicted.peak <= real + x.nbytes


def test_a_recomputed_task_that_begins_in_place_works_on_a_copy() -> None:
    model = Sequential(ReLU(inplace=True), Linear(8, 8))
    counts = count(model, torch.empty(1, 8))
    recomputed = counts.task(4, 0, 2, checkpoint=True)
    plain = counts.task(4, 0, 2, checkpoint=False)
    input_bytes = 4 * 8 * 4
    assert recomputed.forward - plain.forward == input_bytes


def test_the_parts_add_up() -> None:
    setup = Setup(24, (8,), 4, "always", optimizer_named("adam", foreach=True))
    (device,) = setup_memory(counted(mixed, (24, 8)), setup)
    parameters = sum(p.nbytes for p in mixed().parameters())
    assert device.optimizer == 2 * parameters
    assert device.gradients in (0, parameters)
    model = (device.parameters, device.gradients, device.optimizer, device.update)
    parts = (device.stashed, device.working, device.skips, device.copies)
    assert device.peak == sum(model) + sum(parts)


# Each row has the name of an optimizer, and the size of its state as a multiple of the size of the
# 16-bit parameters. The 32-bit copy of the parameters in the state adds 2 to this multiple.
@pytest.mark.parametrize(
    ("name", "state"), [("sgd", 2), ("momentum", 2 + 2), ("adam", 2 + 2 * 2), ("none", 0)]
)
def test_master_weights_are_in_float32_and_so_is_the_state(name: str, state: float) -> None:
    held = optimizer_named(name, foreach=True, master_weights=True)
    plain = optimizer_named(name, foreach=True)
    assert held.state == state
    expected = 0.0
    if plain.updates:
        expected = 2 * (plain.temporaries([100, 100]) + 200)
    assert held.temporaries([100, 100]) == expected


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_steps_peak_is_within_five_percent_of_a_real_run(autocast: torch.dtype | None) -> None:
    """Check a predicted memory peak on the CPU, whose attention kernel is fused."""
    block = partial(TransformerEncoderLayer, 64, 4, 256, dropout=0.0, batch_first=True)
    model = Sequential(block(), block(), block(), block())
    x = torch.randn(8, 64, 64)
    counts = count(model, x, device="cpu", autocast=autocast)

    (device,) = setup_memory(counts, Setup(8, (4,), 1, "never"))

    live = Live()
    live.ignore([*model.parameters(), x])
    with live:
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            y = model(x)
        y.backward(torch.ones_like(y))
    parameters = sum(p.nbytes for p in model.parameters())
    real = live.peak() + x.nbytes + parameters
    assert device.peak == pytest.approx(real, rel=0.05)


STAGE_LAYERS = 3


def stages(count: int) -> Sequential:
    """Return the layers of `count` stages. A stage has large activations and a small output."""
    layers: list[Module] = []
    for _ in range(count):
        layers += [Linear(8, 256), GELU(), Linear(256, 8)]
    return Sequential(*layers)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NAMED)
def test_a_step_keeps_the_micro_batches_that_its_schedule_has_in_flight(name: str) -> None:
    """Check that a device keeps the activations of as many micro-batches as its schedule says.

    In some schedules, a backward has two halves: the gradients of inputs, and later those of
    weights. Between the halves, a task must not keep more than its layers saved in forward.
    """
    n, m, samples = 4, 16, 512
    v = NAMED[name][1] or 2
    model = stages(n * v)
    counts = counted(lambda: model, (2, 8))
    balance = [STAGE_LAYERS] * (n * v)
    x = torch.empty(m * samples, 8, device="meta")
    devices = [f"meta:{d}" for d in range(n)]
    model = model.to("meta")
    pipeline = GPipe(model, balance, devices=devices, chunks=m, checkpoint="never", schedule=name)
    live = OnMeta(n)
    for d, partition in zip(pipeline.schedule.placement, pipeline.partitions, strict=True):
        live.add(partition.parameters(), d)
    live.add([x], 0)
    before: list[int] = []
    kept = [0] * n

    @contextmanager
    def look(task: Task) -> Iterator[None]:
        """Record each device's live bytes before the first task, and the most after any forward."""
        if not before:
            before.extend(live.live)
        yield
        if task.kind == "forward":
            kept[:] = map(max, kept, live.live)

    pipeline.observer = look
    with Copies(live, None):
        pipeline.step(lambda y, _: y.mean(), x, None)

    task = counts.task(samples, STAGE_LAYERS, 2 * STAGE_LAYERS, checkpoint=False)
    in_flight = [(most - least) / task.kept for most, least in zip(kept, before, strict=True)]
    assert in_flight == pytest.approx(make(name, n, m).in_flight, rel=0.05)
    setup = Setup(len(x), tuple(balance), m, "never", schedule=name)
    predicted = setup_memory(counts, setup)
    for device, most, least in zip(predicted, live.peak, before, strict=True):
        assert device.peak - device.parameters == pytest.approx(most - least, rel=0.05)
