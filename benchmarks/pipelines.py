"""Pipelines on CPU devices, by the engine that is asked for: also the graph engine as several GPUs would use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchgpipe import GPipe

__all__ = ["ENGINES", "on_cpu"]

ENGINES = ("graph", "across", "workers")


def on_cpu(layers: nn.Sequential, balance: Sequence[int], engine: str | None = None, **options: Any) -> GPipe:
    """Return a pipeline; `engine` is as in `GPipe`, `None` for its choice, or `"across"`.

    That is the graph engine as it works across devices, but for the copies: each task is a node, with ties.
    """
    if engine is not None:
        options["engine"] = "graph" if engine == "across" else engine
    model = GPipe(layers, balance, devices=["cpu"] * len(balance), **options)
    if engine == "across":
        used: Any = model.__dict__["_engine"]
        used.tied = used.copies.needed = True
    return model
