"""Count the live bytes of one torchgpipe, whichever is first on the path, for `benchmarks.memory`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.child import serve
from benchmarks.pipelines import evenly, on_cpu
from reproduce.models import amoebanetd, unet
from reproduce.run.live_bytes import LiveBytes

WIDTHS = (16, 512, 512, 256, 64, 32, 16, 16)

# name -> (layers, the shape of a sample, samples per micro-batch)
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "AmoebaNet-D (3, 16)": (lambda: amoebanetd(3, 16, num_classes=10), (3, 224, 224), 1),
    "U-Net (2, 4)": (lambda: unet(num_convs=2, base_channels=4), (3, 64, 64), 1),
    "linear layers": (lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS))), (16,), 8),
}
STEPS = 3  # the first may differ


def measure(model: str, n: int, m: int, mode: str, engine: str | None) -> int:
    """Return the peak bytes over training steps of `m` micro-batches; `engine` is None where there is but one."""
    torch.manual_seed(0)
    build, shape, samples = MODELS[model]
    layers = build()
    counter = LiveBytes(1)
    x = torch.randn(m * samples, *shape)
    counter.add([x, *layers.parameters(), *layers.buffers()], 0)
    gc.collect()
    with _watched_threads(counter), counter.watch(0):
        piped: Any = on_cpu(layers, evenly(layers, n), engine, chunks=m, checkpoint=mode)
        for _ in range(STEPS):
            piped(x).square().mean().backward()
            layers.zero_grad()
    return counter.peak[0]


@contextmanager
def _watched_threads(counter: LiveBytes) -> Iterator[None]:
    """Count what is made in threads that start meanwhile."""
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with counter.watch(0):
            run(thread)

    with patch.object(threading.Thread, "run", watched):
        yield


if __name__ == "__main__":
    serve(measure)
