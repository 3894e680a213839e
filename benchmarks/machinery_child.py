"""Measure one torchgpipe, whichever is first on the path, for `benchmarks.machinery`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from benchmarks.child import serve
from benchmarks.pipelines import on_cpu

Sample = tuple[float, float]

# What a plain loop over the same layers and micro-batches does in place of each checkpoint mode.
PLAIN = {"never": "plain", "always": "plain checkpointed"}


def build(n: int, m: int, mode: str, engine: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a model of `n` layers, one per partition, in a plain loop or a pipeline (`pipelines` says of `engine`)."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))
    if mode == "plain":
        return lambda x: torch.cat([layers(micro_batch) for micro_batch in x.chunk(m)])
    if mode == "plain checkpointed":

        def run(x: Tensor) -> Tensor:
            outputs = []
            for micro_batch in x.chunk(m):
                for layer in layers:
                    micro_batch = plain_checkpoint(layer, micro_batch, use_reentrant=False)
                outputs.append(micro_batch)
            return torch.cat(outputs)

        return run
    return on_cpu(layers, [1] * n, engine, chunks=m, checkpoint=mode)


def measure(steps: int, n: int, m: int, mode: str, engine: str | None = None) -> list[Sample]:
    """Return (forward, backward) seconds per task of `steps` steps, after three to warm up."""
    model = build(n, m, mode, engine)
    x = torch.randn(m, 8)
    samples = []
    for step in range(-3, steps):
        began = time.perf_counter()
        y = model(x)
        ran = time.perf_counter()
        loss = y.sum()
        summed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        if step >= 0:
            samples.append(((ran - began) / (n * m), (ended - summed) / (n * m)))
    return samples


if __name__ == "__main__":
    serve(measure)
