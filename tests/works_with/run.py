"""Run the code of a row, with a pipeline or with the plain layers in its place, and say what it leaves behind."""

from __future__ import annotations

import functools
import linecache
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import GPipe

from ..behaviours.compare import found
from .given import Block, Checkpointed, LoRA, train


def pipeline(engine: str, mode: str) -> Any:
    """Return what `GPipe` is in the code: the real one, with settings that the code does not show."""
    return functools.partial(GPipe, engine=engine, checkpoint=mode)  # type: ignore[arg-type]


def names(kind: Any, rank: int = 0, **more: Any) -> dict[str, Any]:
    """Return what the code may use by name; `kind` is called `GPipe` there."""
    compiled: list[nn.Module] = []

    def backend(graph: nn.Module, inputs: object) -> nn.Module:
        compiled.append(graph)
        return graph

    torch.manual_seed(0)
    layers, other_layers = (nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3)) for _ in range(2))
    # Ten samples in four chunks: the last micro-batch is smaller.
    batches = [(torch.randn(10, 6), torch.randn(10, 3)) for _ in range(6)]
    return more | {
        "torch": torch, "nn": nn, "GPipe": kind,
        "Block": Block, "LoRA": LoRA, "Checkpointed": Checkpointed, "train": train,
        "layers": layers, "other_layers": other_layers,
        "balance": [2, 2], "devices": ["cpu", "cpu"], "batches": batches[3 * rank :][:3],
        "backend": backend, "compiled": compiled,
    }  # fmt: skip


def left_by(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run `code` and return the tensors and numbers that it leaves behind, by name."""
    before = set(names)
    # So that an error shows the line.
    file = f"<code {len(linecache.cache)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    exec(compile(code, file, "exec"), names)
    left = found({key: names[key] for key in names.keys() - before})
    return {name: x.detach().as_subclass(Tensor).clone() if isinstance(x, Tensor) else x for name, x in left}
