"""Measure how long the host takes to issue work, without the time in which it waits for a device.

The host issues work by launching kernels. CUDA queues about a thousand launches. While the queue is
full, each launch waits until the device has finished an earlier kernel. So a clock around many
launches measures the device, not the host. Here, the host waits for the device on purpose, before
the queue is full, and the seconds of these pauses are subtracted.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

LEAST_SECONDS = 0.001
"""No pause begins within so many seconds after the last one. A launch takes the host two
microseconds or more, so the queue then has at most half of the launches that fit into it."""


class Pauses:
    """Within a `with` block, let the host pause before the forward and the backward of layers.

    Otherwise, CUDA's queue of launched kernels could become full. A launch would then wait for the
    device, and this wait would count as time of the host. A pause lasts until the device has
    finished all work, so the queue is empty after it.

    Args:
        layers: The layers. Each has to launch fewer kernels than half of CUDA's queue can hold.
        wait: A function that waits until the device has finished all work.
    """

    def __init__(self, layers: Iterable[nn.Module], wait: Callable[[], object]) -> None:
        self._layers = layers
        self._wait = wait
        self._pauses: list[tuple[float, float]] = []  # the beginning and the end of each
        self._hooks: list[Any] = []

    def __enter__(self) -> "Pauses":
        for layer in self._layers:
            before_forward = layer.register_forward_pre_hook(self._pause_if_due)
            after_forward = layer.register_forward_hook(self._pause_before_backward)
            self._hooks += [before_forward, after_forward]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def pause(self) -> None:
        """Wait until the device has finished all work, and remember how long that took."""
        began = time.perf_counter()
        self._wait()
        self._pauses.append((began, time.perf_counter()))

    def seconds(self, start: float, end: float) -> float:
        """Return the total seconds of the pauses between two readings of `time.perf_counter`."""
        total = 0.0
        for began, ended in self._pauses:
            if start <= began and ended <= end:
                total += ended - began
        return total

    def _pause_if_due(self, *of_hook: object) -> None:
        last = self._pauses[-1][1] if self._pauses else 0.0
        if time.perf_counter() - last >= LEAST_SECONDS:
            self.pause()

    def _pause_before_backward(self, layer: nn.Module, inputs: object, output: object) -> None:
        """Let the host pause before the layer's backward, by hooks on the tensors of `output`."""
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(self._pause_if_due)


def host_seconds(
    issue: Callable[[], object], layers: Iterable[nn.Module], wait: Callable[[], object]
) -> float:
    """Return the seconds that the host takes to issue work, such as a training step.

    The host waits for the device between layers, so that CUDA's queue of launches never becomes
    full (see `Pauses`). The seconds of these waits are subtracted.

    Args:
        issue: A function that issues the work.
        layers: The layers that the work runs.
        wait: A function that waits until the device has finished all work.
    """
    with Pauses(layers, wait) as pauses:
        pauses.pause()
        start = time.perf_counter()
        issue()
        end = time.perf_counter()
    return end - start - pauses.seconds(start, end)
