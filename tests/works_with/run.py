"""Run the code of a row, with a pipeline or with the plain layers in its place, and compare what it leaves behind."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import GPipe

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
    return dict(found for key in names.keys() - before for found in _found(key, names[key]))


def _found(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "to_local"):  # a distributed tensor: what this rank has of it
        value = value.to_local()
    if isinstance(value, bool | int | float | str | None):
        yield name, value
    elif isinstance(value, Tensor):
        yield name, value.detach().as_subclass(Tensor).clone()
    elif isinstance(value, nn.Module):
        for key, x in value.state_dict().items():
            yield from _found(f"{name}: {key}", x)
        for key, p in value.named_parameters():
            yield from _found(f"{name}: gradient of {key}", p.grad)
    elif isinstance(value, list | tuple):
        yield f"{name}: length", len(value)
        for k, x in enumerate(value):
            yield from _found(f"{name}[{k}]", x)
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from _found(f"{name}[{key!r}]", x)


def differences(ours: dict[str, Any], plain: dict[str, Any], *, rounded: bool = False) -> list[str]:
    """Return the names of what differs: to the bit, or by more than rounding explains."""
    return [k for k in sorted({*ours, *plain}) if not _same(ours.get(k, "none"), plain.get(k, "none"), rounded)]


def _same(x: Any, y: Any, rounded: bool) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.allclose(x, y, rtol=1e-5, atol=1e-7) if rounded else torch.equal(x, y)
    if rounded and isinstance(x, float) and isinstance(y, float):
        return abs(x - y) <= 1e-5 * abs(y)
    return type(x) is type(y) and bool(x == y)
