"""On CUDA: behaviours in one process and over ranks. Streams wait for what they need, and for nothing else.

Memory is given back, and the peaks that are predicted are those of the allocator; events time tasks.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.training import Balancer, FakeData
from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

from .behaviours.compare import REORDERED
from .behaviours.parts.draw import Draw
from .behaviours.row import Row, steps, unlike
from .library.layers import Pop, Stash
from .parts import OPTIMIZERS, Fails
from .plain import piped

DEVICES = torch.cuda.device_count()
WIDTH = 2048


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        count > DEVICES, reason=f"needs {count} CUDA devices, but there are {DEVICES}"
    )


pytestmark = needs(1)


def on(*devices: str) -> Any:
    """Return the devices of a pipeline's partitions, with the mark that skips a test where there are fewer."""
    count = max((int(device[5:]) + 1 for device in devices if device != "cpu"), default=0)
    return pytest.param(list(devices), id=" ".join(devices), marks=needs(count))


ON_GPUS = [
    on("cuda:0"),
    on("cuda:0", "cuda:0"),
    on(*["cuda:0"] * 4),
    on("cuda:0", "cuda:1"),
    on("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
]
# With the host as a second device, so that tensors cross, and streams wait, also where there is one GPU.
WITH_HOST = [on("cpu", "cuda:0"), on("cuda:0", "cpu"), on("cuda:0", "cpu", "cuda:0", "cpu")]
# Ranks that share a GPU send through pinned memory; those that have one each, by NCCL.
RANKS = [on(*["cuda:0"] * 4), on(*(f"cuda:{rank}" for rank in range(4)))]


def ways(*places: Any) -> pytest.MarkDecorator:
    """Run a test on these devices in one process, and over ranks."""
    # Ranks start where a test needs them, so not where it is skipped.
    over = [pytest.mark.ranks] if DEVICES else []
    cases: list[Any] = [("graph", place, []) for place in places] + [
        ("ranks", place, over) for place in RANKS
    ]
    return pytest.mark.parametrize(
        ("engine", "devices"),
        [
            pytest.param(
                engine, *place.values, id=f"{engine} {place.id}", marks=[*place.marks, *marks]
            )
            for engine, place, marks in cases
        ],
    )


def layers(last: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32),
        Stash(torch.sin),
        nn.Linear(32, 32),
        Fails(),
        nn.LayerNorm(32),
        Pop(),
        nn.Linear(32, 32),
        last(),
    )


def given() -> Tensor:
    return torch.randn(14, 16).requires_grad_()


def balance(devices: Sequence[str]) -> list[int]:
    return [8 // len(devices)] * len(devices)


def in_bfloat16(run: Any, value: Any) -> Any:
    with torch.autocast("cuda", torch.bfloat16):
        return steps(run, value)


# As kernels may add in another order on other streams, gradients are not equal to the bit; in bfloat16, with eight bits
# of mantissa, another order of sums shows.
BEHAVIOURS = [
    Row("usual", lambda: layers(), given, use=steps, tolerance=REORDERED),
    Row(
        "batch norm",
        lambda: layers(lambda: nn.BatchNorm1d(32)),
        given,
        use=steps,
        tolerance=REORDERED,
    ),
    Row("autocast", lambda: layers(), given, use=in_bfloat16, tolerance=2**-6),
]


@ways(*ON_GPUS)
@pytest.mark.parametrize("row", BEHAVIOURS, ids=lambda row: row.name)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_behaviours(
    row: Row, chunks: int, engine: str, devices: list[str], checkpoint: Any
) -> None:
    """Outputs, gradients and buffers are those of the plain layers on the first device."""
    row = replace(row, balance=balance(devices), chunks=chunks)
    assert unlike(row, "", engine, checkpoint, devices) == []


@ways(*ON_GPUS, *WITH_HOST)
def test_a_recomputation_drops_the_same(engine: str, devices: list[str]) -> None:
    draw = Draw(lambda x: nn.functional.dropout(torch.ones_like(x), 0.5))
    options: dict[str, Any] = {"engine": engine, "devices": devices, "checkpoint": "always"}
    model = piped(layers(lambda: draw), balance(devices), 4, **options)
    y = model(torch.randn(8, 16))
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    y.sum().backward()
    assert len(draw.first) == 4
    assert torch.equal(torch.stack(draw.first), torch.stack(draw.second[::-1]))
    after = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    assert all(map(torch.equal, before, after)), "backward took numbers of the caller's"


@ways(*ON_GPUS, *WITH_HOST)
@pytest.mark.parametrize("when", ["forward", "recompute", "backward"])
def test_an_error_arrives_and_the_next_call_works(
    engine: str, devices: list[str], when: str
) -> None:
    model = piped(
        layers(), balance(devices), 4, engine=engine, devices=devices, checkpoint="always"
    )
    x = torch.randn(8, 16)
    for calls_before in range(3):
        model[3].fail(when, ZeroDivisionError("trouble"), calls_before=calls_before)
        with pytest.raises(ZeroDivisionError, match="trouble"):
            model(x).sum().backward()
        torch.cuda.synchronize()  # nothing is left that waits for the rank that failed
        if engine == "ranks":
            model._pipeline.close()  # the last rank may have ended its backward by then
        model.zero_grad()
        model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class Late(nn.Module):
    """Make the device busy before the result is there, in forward and backward; who does not wait reads too early."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Late.apply(x * self.scale)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000)  # about a millisecond
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000)
        return grads[0] * 2


@ways(*ON_GPUS, *WITH_HOST)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_nothing_is_read_before_it_is_there(
    engine: str, devices: list[str], checkpoint: Any, streams: bool
) -> None:
    n, options = len(devices), {"copy_streams": streams} if engine == "graph" else {}
    module = nn.Sequential(*(Late() for _ in range(n)))
    model = piped(module, [1] * n, engine=engine, devices=devices, checkpoint=checkpoint, **options)
    # Large enough that a copy takes a while; small whole numbers, so that every sum is exact.
    x = torch.randint(3, (6, 1 << 18)).float().to(devices[0]).requires_grad_()
    for step in range(1, 4):
        y = model(x)
        y.sum().backward()
        assert torch.equal(y.detach().to(devices[0]), x.detach() * 2**n)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, float(2**n * step)))


class Noted(nn.Module):
    """Mark the end of each forward by an event; let the one of micro-batch `slow` take about a second."""

    def __init__(self, slow: int | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.done: list[torch.cuda.Event] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(self.done) == self.slow:
            torch.cuda._sleep(2_000_000_000)
        y = x + 1
        self.done.append(torch.cuda.current_stream(x.device).record_event())
        return y


@needs(2)
def test_a_device_works_while_the_one_before_is_busy_with_the_next_micro_batch() -> None:
    first, second = Noted(), Noted()
    model = GPipe(nn.Sequential(first, second), [1, 1], devices=["cuda:0", "cuda:1"], chunks=2)
    x = torch.zeros(2, 16, device="cuda:0")
    for slow in (None, 1):  # what CUDA does once, on first use, may wait for everything
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        first.slow = slow
        first.done.clear()
        second.done.clear()
        with torch.no_grad():
            y = model(x)
    second.done[0].synchronize()
    assert not first.done[1].query()
    assert torch.equal(y.cpu(), torch.full((2, 16), 2.0))


@pytest.mark.parametrize("devices", [*ON_GPUS, *WITH_HOST])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stream_of_the_callers_own(devices: list[str], checkpoint: Any) -> None:
    """The pipeline computes on the streams that are current when it is called; backward may be called on others."""
    model = GPipe(layers(), balance(devices), devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(13, 16, device=devices[0])
    y = model(x)
    y.square().sum().backward()
    expected = [y.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()

    streams = [torch.cuda.Stream(d) for d in range(DEVICES)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        y = model(x)
        loss = y.square().sum()
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    loss.backward()
    torch.cuda.synchronize()
    torch.testing.assert_close([y.detach(), *(p.grad for p in model.parameters())], expected)


@pytest.mark.parametrize("devices", ON_GPUS)  # a copy to the host waits for it
def test_no_host_synchronization_within_a_step(devices: list[str], checkpoint: Any) -> None:
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4, checkpoint=checkpoint)
    x = torch.randn(8, 16, device=model.devices[0])
    model(x).sum().backward()
    torch.cuda.synchronize()
    model.zero_grad()
    torch.cuda.set_sync_debug_mode(
        "error"
    )  # of PyTorch: whoever makes the host wait raises an error
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("devices", [*ON_GPUS, *WITH_HOST])
def test_dropping_frees_the_device(devices: list[str]) -> None:
    gc.collect()
    used = [torch.cuda.memory_allocated(d) for d in range(DEVICES)]
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    del model
    gc.collect()
    torch.cuda.synchronize()
    # cuBLAS keeps a workspace per stream that it has run on.
    torch._C._cuda_clearCublasWorkspaces()
    assert all(torch.cuda.memory_allocated(d) <= used[d] for d in range(DEVICES))


@ways()
def test_pinned_memory_is_used_again(engine: str, devices: list[str]) -> None:
    model, pinned = piped(layers(), balance(devices), 4, engine=engine, devices=devices), []
    for _ in range(20):
        model(torch.randn(8, 16)).sum().backward()
        pinned.append(torch.cuda.host_memory_stats().get("num_host_alloc", 0))
    assert pinned[-1] <= 2 * pinned[2], pinned  # which blocks are free is a matter of time
    assert pinned[-1] > 0 or len({*devices}) > 1


SETUPS = [
    ("", 32768, chunks, checkpoint)
    for chunks, checkpoint in product((1, 4), ("always", "except_last", "never"))
]
# With few activations the optimizer's step is the peak: by default, all parameters are updated at once.
SETUPS += [(name, 64, 2, "always") for name in ("momentum", "rmsprop", "adagrad", "adam", "adamw")]


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=needs(2))])
@pytest.mark.parametrize(("optimizer", "batch", "chunks", "checkpoint"), SETUPS)
def test_predicted_memory_is_allocated(
    n: int, optimizer: str, batch: int, chunks: int, checkpoint: Any
) -> None:
    """Within 5 %, of gigabytes: the allocator rounds sizes up, and products may take workspaces for a moment."""

    def module() -> (
        nn.Sequential
    ):  # to add up a bias's gradient takes memory for a moment: 132 MiB here on an H100
        return nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
        )

    options: dict[str, Any] = (
        {"optimizer": optimizer_named(optimizer, foreach=True)} if optimizer else {}
    )
    setup = Setup(batch, (8 // n,) * n, chunks, checkpoint, **options)
    with torch.device("meta"):
        counts = count(module(), torch.empty(1, WIDTH))
    predicted = [device.peak for device in setup_memory(counts, setup)]
    assert allocated(module(), setup, OPTIMIZERS.get(optimizer)) == pytest.approx(
        predicted, rel=0.05
    )


def allocated(
    module: nn.Sequential, setup: Setup, make: Callable[..., torch.optim.Optimizer] | None
) -> list[int]:
    """Return each device's peak in the second step, beside workspaces."""
    devices = [torch.device("cuda", j) for j in range(len(setup.balance))]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    held = [torch.cuda.memory_allocated(d) for d in devices]
    model = GPipe(
        module, setup.balance, devices=devices, chunks=setup.chunks, checkpoint=setup.checkpoint
    )
    optimizer = None if make is None else make(model.parameters(), lr=0.1)
    x = torch.randn(setup.batch_size, WIDTH, device=devices[0])
    for _ in range(2):  # predicted is the second step, and every later one
        model.zero_grad()
        for d in devices:
            torch.cuda.synchronize(d)
            torch.cuda.reset_peak_memory_stats(d)
        y = model(x)
        gradient = torch.empty_like(y)
        y.backward(gradient)
        del gradient
        if optimizer is not None:
            optimizer.step()
        del y
    for d in devices:
        torch.cuda.synchronize(d)
    peaks = [torch.cuda.max_memory_allocated(d) for d in devices]
    with_workspaces = [torch.cuda.memory_allocated(d) for d in devices]
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = [
        w - torch.cuda.memory_allocated(d) for w, d in zip(with_workspaces, devices, strict=True)
    ]
    return [peak - w - h for peak, w, h in zip(peaks, workspaces, held, strict=True)]


@pytest.mark.parametrize("name", ["n2m1", "n2m4", "n8m32", "checkpoint-only m4"])
def test_one_gpu_plays_all_devices_and_its_events_time_the_tasks(name: str) -> None:
    row = next(
        row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows if row.name == name
    )
    gpu = Devices("cuda", 1)
    emulation = Emulation(row, gpu, FakeData([row], 0), Balancer(gpu), 0)
    for run in [emulation.run() for _ in range(3)]:
        assert all(seconds > 0 for seconds in run.tasks.values())
        assert (
            sum(run.tasks.values()) + run.loss + sum(run.updates) < 1.001 * run.work
        )  # what lies between is of none
    most = emulation.step().work * (row.micro_batches or 1) / emulation.executed
    assert 0 < emulation.step().seconds < 1.001 * most
    assert {device.type for device in emulation.training.devices} == {"cuda"}
