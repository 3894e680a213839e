"""Build pipelines on CPU devices with a chosen engine.

An engine is the part of `GPipe` that runs the partitions. The choice "across" makes the graph
engine work on CPUs as it does on several GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe import GPipe

ENGINES = ("graph", "across", "workers")


def evenly(layers: nn.Sequential, n: int) -> list[int]:
    """Return a balance that gives each of `n` partitions about the same number of layers."""
    parts = torch.arange(len(layers)).tensor_split(n)
    return [len(part) for part in parts]


def on_cpu(
    layers: nn.Sequential, balance: Sequence[int], engine: str | None = None, **options: Any
) -> GPipe:
    """Return a pipeline on CPU devices: one for each partition, or the `devices` in `options`.

    Args:
        layers: The layers of the pipeline.
        balance: The number of layers of each partition.
        engine: An engine of `GPipe`, `None` for its default engine, or `"across"`: the graph engine
            as it works on several GPUs, but without copies. In this engine, each task is a node of
            the autograd graph, and additional edges between these nodes order the backward.
        options: Further options of `GPipe`.
    """
    if engine is not None:
        options["engine"] = "graph" if engine == "across" else engine
    options.setdefault("devices", ["cpu"] * len(balance))
    model = GPipe(layers, balance, **options)
    if engine == "across":
        used: Any = model.__dict__["_engine"]
        used.tied = True
        if used.copies is False:
            used.copies = True
        else:
            used.copies.needed = True  # older versions have an object here
    return model
