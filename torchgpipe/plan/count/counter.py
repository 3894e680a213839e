"""Notice the operators that run, and count each: its class, floating-point operations, and bytes.

Floating-point operations come from PyTorch's own formulas (`torch.utils.flop_counter`); whatever has none is bound by
memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan.count.attention import attention_operator
from torchgpipe.plan.count.convolution import convolution
from torchgpipe.plan.hardware.operators import Operator, OperatorClass, bytes_of, dtype_of, flops_of
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in

# Names of operators -> their class; others are elementwise, unless they do floating-point operations by a formula.
KINDS: dict[OperatorClass, Sequence[str]] = {
    "norm": ("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", "softmax"),
    "pool": ("pool", "upsample"),
}
# Operators that read of their first tensor only as much as they put out, and those that only overwrite it.
LOOKUPS = ("embedding", "index_select", "gather", "index")
WRITE_ONLY = ("fill_", "zero_", "copy_")


class Counter(TorchDispatchMode):
    """Append each operator that this thread runs to `operators`; those that only make views do nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            result = func(*args, **kwargs)
            if func is torch.ops.aten.convolution.default:
                self.operators += convolution(args, [result])
            elif func is torch.ops.aten.convolution_backward.default:
                self.operators += convolution(args, result)
            elif (fused := attention_operator(func, args, kwargs, result)) is not None:
                self.operators.append(fused)
            else:
                self.operators += _operators(func, args, kwargs, result)
            return result


def _operators(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Operator]:
    outputs = list(tensors_in(result))
    if not outputs or _makes_views(func, args, outputs):
        return []
    inputs = list(tensors_in((args, dict(kwargs))))
    flops = flops_of(func, args, kwargs, result)
    named = [kind for kind, names in KINDS.items() if any(part in str(func) for part in names)]
    kind: OperatorClass = "matmul" if flops else named[0] if named else "elementwise"
    written = sum(map(bytes_of, outputs))
    read = list(map(bytes_of, inputs))
    name = func.__name__.partition(".")[0]
    if name in WRITE_ONLY:
        read[0] = 0
    elif name in LOOKUPS:
        read[0] = min(read[0], written)
    moved = sum(read) + written
    if (
        kind == "norm"
    ):  # twice over their largest input: once for the statistics, once to apply them
        moved += max(map(bytes_of, inputs), default=0) * (2 if "backward" in str(func) else 1)
    dtype = dtype_of(outputs[0])
    if (
        kind == "matmul"
        and dtype == "float32"
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    ):
        dtype = "tf32"
    return [Operator(kind, dtype, flops, float(moved))]


def _makes_views(func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> bool:
    """Return whether the operator computes nothing: its outputs are other views of its input."""
    if getattr(func, "is_view", False):
        return True
    views = (
        "aten._unsafe_view.default",
        "aten.detach.default",
        "aten.empty",
        "aten.new_empty",
        "aten._reshape_alias",
    )
    return str(func).startswith(views)
