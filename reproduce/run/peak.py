"""Measure a training step's peak memory on each device.

On CUDA PyTorch's caching allocator counts: bytes allocated to tensors, and bytes reserved from the device. On a
CPU nothing counts, and on one GPU that plays several nothing tells them apart. There the bytes of all tensors alive are
counted by `LiveBytes`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch

from reproduce.machine.devices import Devices
from reproduce.run.live_bytes import LiveBytes
from reproduce.run.training import Training

Peak = dict[str, list[int]]  # what is counted -> the most bytes on each of the training's devices


def measure_peak(
    training: Training, devices: Devices, *, steps: int, before: Callable[[int], None] = lambda step: None
) -> Peak:
    """Run whole steps and return `peak_allocated`, the most bytes of tensors, and on CUDA also `peak_reserved`.

    Two steps at least are needed to see everything: an optimizer makes its state at the end of the first.
    Nothing else should be alive on the devices. `before` is told the number of each step.
    """

    def run() -> None:
        for step in range(steps):
            before(step)
            training.step()

    alone = devices.kind == "cuda" and len(set(training.devices)) == len(training.devices)
    return _measure_cuda(training, devices, run) if alone else _measure_live(training, run)


def _measure_cuda(training: Training, devices: Devices, run: Callable[[], None]) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    for device in training.devices:
        torch.cuda.reset_peak_memory_stats(device)
    run()
    devices.synchronize()
    return {
        "peak_allocated": [torch.cuda.max_memory_allocated(device) for device in training.devices],
        "peak_reserved": [torch.cuda.max_memory_reserved(device) for device in training.devices],
    }


def _measure_live(training: Training, run: Callable[[], None]) -> Peak:
    counter = LiveBytes(len(training.devices))
    for device, partition in enumerate(training.partitions):
        counter.add([*partition.parameters(), *partition.buffers()], device)
    counter.add([training.input], 0)
    counter.add([training.target], len(training.devices) - 1)

    pipelined = training.row.partitions is not None
    watch = training.observed(lambda task: counter.watch(task.partition)) if pipelined else contextlib.nullcontext()
    with watch, counter.watch():
        run()
    return {"peak_allocated": counter.peak}
