"""Count the live bytes of one torchgpipe, whichever is first on the path, for `benchmarks.memory`."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.live_bytes import LiveBytes
from benchmarks.models import amoebanetd, unet

WIDTHS = (16, 512, 512, 256, 64, 32, 16, 16)

# name -> (layers, the shape of a sample, samples per micro-batch)
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "AmoebaNet-D (3, 16)": (lambda: amoebanetd(3, 16, num_classes=10), (3, 224, 224), 1),
    "U-Net (2, 4)": (lambda: unet(num_convs=2, base_channels=4), (3, 64, 64), 1),
    "linear layers": (lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS))), (16,), 8),
}
STEPS = 3  # the first may differ


def measure(model: str, n: int, m: int, mode: str, engine: str | None) -> int:
    """Return the peak bytes over training steps of `m` micro-batches, gradients kept from step to step.

    `engine` is None for versions that have but one.
    """
    from torchgpipe import GPipe

    torch.manual_seed(0)
    build, shape, samples = MODELS[model]
    layers = build()
    counts = [len(part) for part in torch.arange(len(layers)).chunk(n)]
    counter = LiveBytes(1)
    options: dict[str, Any] = {} if engine is None else {"engine": engine}
    pipeline: Any = GPipe(layers, counts, devices=["cpu"] * len(counts), chunks=m, checkpoint=mode, **options)  # type: ignore[arg-type]
    if engine == "workers":
        # They run backward in threads of their own; all others in the one that calls backward().
        pipeline.observer = lambda task: counter.watch(0)
    else:
        for layer in layers:
            _follow(layer, counter)

    x = torch.randn(m * samples, *shape)
    counter.add([x, *layers.parameters(), *layers.buffers()], 0)
    gc.collect()
    with counter.watch(0):
        for _ in range(STEPS):
            pipeline(x).square().mean().backward()
    return counter.peak[0]


def _follow(layer: nn.Module, counter: LiveBytes) -> None:
    """Count what the layer makes in a thread of the pipeline's own."""
    entered: list[Any] = []

    def enter(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            watch = counter.watch(0)
            watch.__enter__()
            entered.append(watch)

    def leave(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)


def main() -> None:
    """Answer each line [model, n, m, mode] on standard input with the peak."""
    import torchgpipe

    torch.set_num_threads(1)
    print(json.dumps(f"torchgpipe {torchgpipe.__version__}"), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
