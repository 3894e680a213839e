"""Count what operators do: their class, floating-point operations, and bytes read and written.

An operator is what reaches PyTorch's dispatcher below autograd: on a GPU about one kernel each. Floating-point
operations come from PyTorch's own formulas (`torch.utils.flop_counter`); whatever has none is bound by memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan._flops import flop_formula

__all__ = ["CLASSES", "Counter", "Operator", "OperatorClass", "tensors_in"]

OperatorClass = Literal["matmul", "conv", "conv3x3", "norm", "pool", "elementwise"]
"""The classes that have efficiencies of their own: `conv3x3` are those convolutions for which libraries have Winograd
kernels, 3 x 3 at stride 1; `elementwise` is whatever reads and writes memory and has no class of its own."""
CLASSES: tuple[str, ...] = get_args(OperatorClass)

# Names of operators -> their class; others are elementwise, unless they do floating-point operations by a formula.
NORMS = ("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", "softmax")
POOLS = ("pool", "upsample")


class Operator(NamedTuple):
    """One operator on one micro-batch: `flops` in the floating-point type `dtype`, `bytes` read and written."""

    kind: OperatorClass
    dtype: str
    flops: float
    bytes: float


class Counter(TorchDispatchMode):
    """Append each operator that this thread runs to `operators`; those that only make views do nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = _operator(func, args, kwargs or {}, result)
        if operator is not None:
            self.operators.append(operator)
        return result


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in what an operator takes or returns: values in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def _operator(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Operator | None:
    outputs = list(tensors_in(result))
    if not outputs or _makes_views(func, args, outputs):
        return None
    inputs = list(tensors_in((args, dict(kwargs))))
    formula = flop_formula(func)
    flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
    kind = _kind(func, args, flops)
    moved = sum(_bytes(x) for x in (*inputs, *outputs))
    if kind == "norm":  # twice over their largest input: once for the statistics, once to apply them
        moved += max(map(_bytes, inputs), default=0) * (2 if "backward" in str(func) else 1)
    return Operator(kind, str(outputs[0].dtype).removeprefix("torch."), flops, float(moved))


def _makes_views(func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> bool:
    """Return whether the operator computes nothing: its outputs are other views of its input."""
    if getattr(func, "is_view", False):
        return True
    name = str(func)
    return name in ("aten._unsafe_view.default", "aten.detach.default", "aten.empty_like.default") or name.startswith(
        ("aten.empty", "aten.new_empty", "aten._reshape_alias")
    )


def _kind(func: Any, args: tuple[Any, ...], flops: float) -> OperatorClass:
    name = str(func)
    if "convolution" in name:
        backward = "backward" in name
        weight, stride = (args[2], args[4]) if backward else (args[1], args[3])
        winograd = tuple(weight.shape[2:]) == (3, 3) and all(s == 1 for s in stride)
        return "conv3x3" if winograd else "conv"
    if flops:
        return "matmul"
    if any(part in name for part in NORMS):
        return "norm"
    return "pool" if any(part in name for part in POOLS) else "elementwise"


def _bytes(x: Tensor) -> int:
    """Return the bytes of the elements that are really there: an expanded dimension is read once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size() if x.layout is torch.strided else 0
