"""On CUDA: memory is given back, and the peaks that are predicted are those of the allocator; events time tasks."""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.training import Balancer, FakeData
from torchgpipe import GPipe
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

from .plain import piped
from .test_cuda import DEVICES, ON_GPUS, WITH_HOST, balance, layers, needs, ways

WIDTH = 2048
pytestmark = needs(1)


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


SETUPS = [("", 32768, chunks, checkpoint) for chunks, checkpoint in product((1, 4), ("always", "except_last", "never"))]
# With few activations the optimizer's step is the peak: by default, all parameters are updated at once.
SETUPS += [(name, 64, 2, "always") for name in ("momentum", "rmsprop", "adagrad", "adam", "adamw")]


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=needs(2))])
@pytest.mark.parametrize(("optimizer", "batch", "chunks", "checkpoint"), SETUPS)
def test_predicted_memory_is_allocated(n: int, optimizer: str, batch: int, chunks: int, checkpoint: Any) -> None:
    """Within 5 %, of gigabytes: the allocator rounds sizes up, and products may take workspaces for a moment."""

    def module() -> nn.Sequential:  # to add up a bias's gradient takes memory for a moment: 132 MiB here on an H100
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))

    options: dict[str, Any] = {"optimizer": optimizer_named(optimizer, foreach=True)} if optimizer else {}
    setup = Setup(batch, (8 // n,) * n, chunks, checkpoint, **options)
    with torch.device("meta"):
        counts = count(module(), torch.empty(1, WIDTH))
    predicted = [device.peak for device in setup_memory(counts, setup)]
    assert allocated(module(), setup, OPTIMIZERS.get(optimizer)) == pytest.approx(predicted, rel=0.05)


def allocated(module: nn.Sequential, setup: Setup, make: Callable[..., torch.optim.Optimizer] | None) -> list[int]:
    """Return each device's peak in the second step, beside workspaces."""
    devices = [torch.device("cuda", j) for j in range(len(setup.balance))]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    held = [torch.cuda.memory_allocated(d) for d in devices]
    model = GPipe(module, setup.balance, devices=devices, chunks=setup.chunks, checkpoint=setup.checkpoint)
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
    workspaces = [w - torch.cuda.memory_allocated(d) for w, d in zip(with_workspaces, devices, strict=True)]
    return [peak - w - h for peak, w, h in zip(peaks, workspaces, held, strict=True)]


@pytest.mark.parametrize("name", ["n2m1", "n2m4", "n8m32", "checkpoint-only m4"])
def test_one_gpu_plays_all_devices_and_its_events_time_the_tasks(name: str) -> None:
    row = next(row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows if row.name == name)
    gpu = Devices("cuda", 1)
    emulation = Emulation(row, gpu, FakeData([row], 0), Balancer(gpu), 0)
    for run in [emulation.run() for _ in range(3)]:
        assert all(seconds > 0 for seconds in run.tasks.values())
        assert sum(run.tasks.values()) + run.loss + sum(run.updates) < 1.001 * run.work  # what lies between is of none
    most = emulation.step().work * (row.micro_batches or 1) / emulation.executed
    assert 0 < emulation.step().seconds < 1.001 * most
    assert {device.type for device in emulation.training.devices} == {"cuda"}
