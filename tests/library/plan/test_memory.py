"""Predicted bytes equal the live bytes of a real pipeline on `meta`, for a table of models and setups."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.layers.batches
from reproduce.models.built import unet
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from torchgpipe import GPipe
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.live import Live
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.tensors.observe import Task

from ...behaviours.parts.kinds import KINDS
from ...behaviours.parts.layers import WIDTH, Do, freeze
from ...parts import OPTIMIZERS


class OnMeta(LiveBytes):
    """Count only tensors on `meta`: an optimizer's step counters are on the host."""

    last = 0
    """The device of the latest tensor, for tensors made from no known one."""

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        super().add([x for x in tensors if x.is_meta], device)

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        known = (self._known.get(id(x.untyped_storage())) for x in tensors if x.numel())
        self.last = next((found[0] for found in known if found is not None), self.last)
        return self.last


class Copies(LiveBytesMode):
    """Count a copy on its target device."""

    counter: OnMeta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = (kwargs or {}).get("device") if "_to_copy" in str(func) else None
        self.device = None if target is None else target.index or 0
        self.counter.last = self.counter.last if self.device is None else self.device
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def counted(build: Callable[[], nn.Sequential], shape: tuple[int, ...]) -> Counts:
    return count(build(), torch.empty(shape))


def real_peaks(
    model: nn.Sequential,
    x: Tensor,
    balance: Any,
    chunks: int,
    checkpoint: Any,
    make: Any,
    zeroed: bool = False,
) -> list[int]:
    """Return each device's peak in the second of two steps, with the optimizer's update.

    The mini-batch stays alive on the first device; the output is alive until parameters are updated.
    """
    with pytest.MonkeyPatch.context() as patch:
        cloned = lambda change, x: mapped(change, x) if change is torch.clone else x  # noqa: E731
        patch.setattr(torchgpipe.layers.batches, "mapped", cloned)
        devices = [f"meta:{j}" for j in range(len(balance))]
        pipeline = GPipe(
            model.to("meta"), balance, devices=devices, chunks=chunks, checkpoint=checkpoint
        )
        # All partitions are on `meta`. Separate parameter groups are updated separately, like devices.
        trained = [
            [p for p in partition.parameters() if p.requires_grad]
            for partition in pipeline.partitions
        ]
        optimizer = make([{"params": parameters} for parameters in trained if parameters])
        live = OnMeta(len(balance))
        for j, partition in enumerate(pipeline.partitions):
            live.add([*partition.parameters(), *partition.buffers()], j)
            for (
                parameter
            ) in partition.parameters():  # some optimizers have their state from the start
                live.add(filter(torch.is_tensor, optimizer.state.get(parameter, {}).values()), j)
        x = x.to("meta")
        live.add([x], 0)
        with Copies(live, None):
            for _ in range(2):
                live.peak = list(live.live)
                output = pipeline(x)
                live.last = len(balance) - 1
                gradient = torch.empty_like(output)
                output.backward(gradient)
                del gradient
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zeroed)
                del output
    return list(live.peak)


def mixed() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
    return nn.Sequential(
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        inner,
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Linear(64, 100),
    )


def wide() -> nn.Sequential:
    """Parameters of many sizes: the largest comes after a small one, in the middle, and before a large one."""
    return nn.Sequential(
        nn.Linear(8, 200, bias=False),
        nn.Linear(200, 100),
        nn.ReLU(),
        nn.Linear(100, 300, bias=False),
        nn.Linear(300, 100, bias=False),
        nn.BatchNorm1d(100),
        nn.Linear(100, 4),
    )


def twice() -> nn.Sequential:
    """Layers of one kind follow each other: those of which one saves its output, its input, both or nothing."""
    kinds = (nn.ReLU, nn.Sigmoid, nn.Identity, lambda: nn.BatchNorm1d(8))
    return nn.Sequential(
        nn.Linear(8, 8), *(make() for make in kinds for _ in range(2)), nn.Linear(8, 8)
    )


def in_place() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.Identity(),
        nn.Dropout(inplace=True),
        nn.ReLU(inplace=True),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
    )


def pairs() -> nn.Sequential:
    """Pairs of tensors are passed from layer to layer."""
    kinds = ("linear", "and its input", "swap", "swap", "sum", "linear")
    return nn.Sequential(*(KINDS[kind](None) for kind in kinds))


def weighted(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Sequential]:
    """Make a layer of a parameter and a function. Whether its gradients are copied depends on what refers to them."""
    return lambda: nn.Sequential(
        nn.Linear(8, 8), Do(function, w=nn.Parameter(torch.empty(8))), nn.Linear(8, 8)
    )


# A model, the shape of its input, and balances. With few samples, the peak is in the optimizer's step.
CASES: list[tuple[Callable[[], nn.Sequential], tuple[int, ...], list[list[int]]]] = [
    (mixed, (24, 8), [[8], [3, 5], [1, 1, 6]]),
    (functools.partial(freeze, mixed, 3), (24, 8), [[3, 5]]),
    (in_place, (24, 8), [[6], [1, 5], [1, 3, 2]]),
    (lambda: unet(2, 1, 4), (8, 3, 16, 16), [[29], [10, 19], [6, 10, 13]]),
    (
        weighted(lambda it, x: (x.sum(0).cos() + it.w.view(2, 4).view(8)) * x),
        (24, 8),
        [[3], [1, 1, 1]],
    ),  # a view
    (
        weighted(lambda it, x: (x.sin().sum(0) + it.w).cos() + x),
        (24, 8),
        [[3], [1, 1, 1]],
    ),  # copied for a parameter
    (
        wide,
        (8, 8),
        [[7], [2, 3, 2], [2, 1, 1, 3], [2, 1, 4]],
    ),  # of the last, nothing to update on device 1
    (wide, (4000, 8), [[3, 4]]),
    (functools.partial(freeze, wide, 3), (8, 8), [[3, 4]]),
    (pairs, (24, WIDTH), [[6], [2, 4], [3, 2, 1]]),
    (twice, (24, 8), [[10], [3, 7], [2, 6, 2]]),
]
ROWS = [(build, shape, balance) for build, shape, balances in CASES for balance in balances]


@pytest.mark.parametrize("zeroed", [False, True], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw"])
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
    kind: Any = OPTIMIZERS[name]
    make = functools.partial(kind, lr=0.1, foreach=foreach)
    setup = Setup(
        shape[0],
        tuple(balance),
        chunks,
        checkpoint,
        optimizer_named(name, foreach=foreach),
        zeroed=zeroed,
    )
    predicted = [device.peak for device in setup_memory(counted(build, shape), setup)]
    assert predicted == real_peaks(
        build(), torch.empty(shape), balance, chunks, checkpoint, make, zeroed=zeroed
    )


def test_an_output_that_its_layer_saves_counts_twice() -> None:
    """User and graph share the output's storage. The prediction counts it twice, as if tasks had separate graphs."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.empty(12, 6)
    (predicted,) = setup_memory(count(model, x), Setup(12, (2,), 1, "never"))
    (real,) = real_peaks(
        model, x, [2], 1, "never", functools.partial(torch.optim.SGD, lr=0.1, foreach=False)
    )
    assert real < predicted.peak <= real + x.nbytes


def test_a_recomputed_task_that_begins_in_place_works_on_a_copy() -> None:
    counts = count(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), torch.empty(1, 8))
    recomputed, plain = (
        counts.task(4, 0, 2, checkpoint=checkpoint) for checkpoint in (True, False)
    )
    assert recomputed.forward - plain.forward == 4 * 8 * 4


def test_the_parts_add_up() -> None:
    setup = Setup(24, (8,), 4, "always", optimizer_named("adam", foreach=True))
    (device,) = setup_memory(counted(mixed, (24, 8)), setup)
    parameters = sum(p.nbytes for p in mixed().parameters())
    assert device.optimizer == 2 * parameters
    assert device.gradients in (0, parameters)
    model = (device.parameters, device.gradients, device.optimizer, device.update)
    parts = (device.stashed, device.working, device.skips, device.copies)
    assert device.peak == sum(model) + sum(parts)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("sgd", 2),
        ("momentum", 2 + 2),
        ("adam", 2 + 2 * 2),
        ("none", 0),
    ],  # the float32 copy: twice as large
)
def test_master_weights_are_in_float32_and_so_is_the_state(name: str, state: float) -> None:
    held = optimizer_named(name, foreach=True, master_weights=True)
    plain = optimizer_named(name, foreach=True)
    assert held.state == state
    assert held.temporaries([100]) == (2 * (plain.temporaries([100]) + 100) if plain.updates else 0)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_steps_peak_is_within_five_percent_of_a_real_run(autocast: torch.dtype | None) -> None:
    """On a CPU, with its fused attention."""
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4))
    )
    x = torch.randn(8, 64, 64)
    (device,) = setup_memory(
        count(model, x, device="cpu", autocast=autocast), Setup(8, (4,), 1, "never")
    )
    live = Live()
    live.ignore([*model.parameters(), x])
    with live:
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            y = model(x)
        y.backward(torch.ones_like(y))
    real = live.peak() + x.nbytes + sum(p.nbytes for p in model.parameters())
    assert device.peak == pytest.approx(real, rel=0.05)


STAGE = (lambda: nn.Linear(8, 256), nn.GELU, lambda: nn.Linear(256, 8))  # what it hands on is small


@pytest.mark.parametrize("name", NAMED)
def test_a_step_keeps_the_micro_batches_that_its_schedule_has_in_flight(name: str) -> None:
    """Until its second half, a backward in halves keeps no more than what the layers have saved."""
    n, m, v = 4, 16, NAMED[name][1] or 2
    model = nn.Sequential(*(f() for _ in range(n * v) for f in STAGE))
    counts, balance = counted(lambda: model, (2, 8)), [len(STAGE)] * (n * v)
    x, devices = torch.empty(m * 512, 8, device="meta"), [f"meta:{d}" for d in range(n)]
    pipeline = GPipe(
        model.to("meta"), balance, devices=devices, chunks=m, checkpoint="never", schedule=name
    )
    live, before, kept, placement = OnMeta(n), list[int](), [0] * n, pipeline.schedule.placement
    for d, partition in zip(placement, pipeline.partitions, strict=True):
        live.add(partition.parameters(), d)
    live.add([x], 0)

    @contextmanager
    def look(task: Task) -> Iterator[None]:
        before[:] = before or live.live
        yield
        kept[:] = map(max, kept, live.live) if task.kind == "forward" else kept

    pipeline.observer = look
    with Copies(live, None):
        pipeline.step(lambda y, _: y.sum(), x, None)
    task = counts.task(512, len(STAGE), 2 * len(STAGE), checkpoint=False)
    tasks = [(most - least) / task.kept for most, least in zip(kept, before, strict=True)]
    setup = Setup(len(x), tuple(balance), m, "never", schedule=name)
    assert tasks == pytest.approx(make(name, n, m).in_flight, rel=0.05)
    for device, most, least in zip(setup_memory(counts, setup), live.peak, before, strict=True):
        assert device.peak - device.parameters == pytest.approx(most - least, rel=0.05)
