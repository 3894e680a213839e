"""List the operators that run, each with its class, its floating-point operations and its bytes.

The floating-point operations come from PyTorch's own formulas (`torch.utils.flop_counter`). An
operator without a formula counts as one that only moves bytes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan.count.attention import attention_operator
from torchgpipe.plan.count.convolution import convolution
from torchgpipe.plan.hardware.operators import Operator, OperatorClass, bytes_of, dtype_of, flops_of
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in

# The class of operators without a formula for floating-point operations, by a part of their name.
# An operator whose name has none of these parts is elementwise.
KINDS: dict[str, OperatorClass] = {
    "batch_norm": "norm",
    "instance_norm": "norm",
    "group_norm": "norm",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "softmax": "norm",
    "pool": "pool",
    "upsample": "pool",
}
# Operators that read only as many bytes of their first tensor as they write.
LOOKUPS = ("embedding", "index_select", "gather", "index")
# Operators that overwrite their first tensor without reading it.
WRITE_ONLY = ("fill_", "zero_", "copy_")
# How the names of operators begin that compute nothing.
VIEWS = (
    "aten._unsafe_view.default",
    "aten.detach.default",
    "aten.empty",
    "aten.new_empty",
    "aten._reshape_alias",
)


class Counter(TorchDispatchMode):
    """Within this context, list this thread's operators, except those that only make views."""

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
    if not outputs or _makes_views(func):
        return []
    full_name = str(func)
    name = func.__name__.partition(".")[0]
    flops = flops_of(func, args, kwargs, result)
    dtype = dtype_of(outputs[0])
    kind: OperatorClass = "elementwise"
    if flops:
        kind = "matmul"
        if dtype == "float32" and accelerator.KERNELS.matmul.fp32_precision == "tf32":
            dtype = "tf32"
    else:
        for part, named in KINDS.items():
            if part in full_name:
                kind = named
                break
    written = sum(map(bytes_of, outputs))
    read = list(map(bytes_of, tensors_in((args, kwargs))))
    moved = written
    if kind == "norm":
        # The largest input is read once for the statistics, and once more to apply them.
        again = 2 if "backward" in full_name else 1
        moved += max(read, default=0) * again
    if name in WRITE_ONLY:
        read[0] = 0
    elif name in LOOKUPS:
        read[0] = min(read[0], written)
    moved += sum(read)
    return [Operator(kind, dtype, flops, float(moved))]


def _makes_views(func: Any) -> bool:
    """Return whether an operator computes nothing: it returns views or uninitialized tensors."""
    return getattr(func, "is_view", False) or str(func).startswith(VIEWS)
