"""Measure a training step's peak memory on each device.

On CUDA PyTorch's caching allocator counts: bytes allocated to tensors, and bytes reserved from the device. On a
CPU nothing counts, so the bytes of all tensors alive are counted by `LiveBytes`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from reproduce.machine.devices import Devices
from reproduce.run.live_bytes import LiveBytes
from reproduce.run.training import Training


class Peak(NamedTuple):
    """Hold the peak bytes of each device: of tensors, and on CUDA also as reserved by the allocator."""

    allocated: list[int]
    reserved: list[int] | None


def measure_peak(
    training: Training, devices: Devices, *, steps: int, before: Callable[[int], None] = lambda step: None
) -> Peak:
    """Run whole steps and return the peak memory of each of the training's devices.

    Two steps at least are needed to see everything: an optimizer makes its state at the end of the first.
    Nothing else should be alive on the devices. `before` is told the number of each step.
    """
    if devices.kind == "cuda":
        return _measure_cuda(training, devices, steps, before)
    return _measure_live(training, steps, before)


def _measure_cuda(training: Training, devices: Devices, steps: int, before: Callable[[int], None]) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    for device in training.devices:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        before(step)
        training.step()
    devices.synchronize()
    return Peak(
        allocated=[torch.cuda.max_memory_allocated(device) for device in training.devices],
        reserved=[torch.cuda.max_memory_reserved(device) for device in training.devices],
    )


def _measure_live(training: Training, steps: int, before: Callable[[int], None]) -> Peak:
    counter = LiveBytes(len(training.devices))
    for device, partition in enumerate(training.partitions):
        counter.add(_state(partition), device)
    counter.add([training.input], 0)
    counter.add([training.target], len(training.devices) - 1)

    pipelined = training.row.partitions is not None
    watch = training.observed(lambda task: counter.watch(task.partition)) if pipelined else contextlib.nullcontext()
    with watch, counter.watch():
        for step in range(steps):
            before(step)
            training.step()
    return Peak(allocated=counter.peak, reserved=None)


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
