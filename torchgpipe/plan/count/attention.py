"""Run the fused attention kernels of CPUs and GPUs on `meta`, and count each as one operator.

PyTorch has fused kernels for `scaled_dot_product_attention` on CPUs and GPUs. These kernels never
write the matrix of all attention scores to memory. On `meta`, PyTorch would run several plain
operators instead, and keep the matrix. The plain operators take more bytes than the fused kernel,
so counting them would be wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.plan.hardware.operators import Operator, bytes_of, dtype_of
from torchgpipe.tensors import accelerator
from torchgpipe.trace.parts import tensors_in

HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""The largest size of a head for which PyTorch has flash attention kernels."""
FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
BACKWARD = tuple(f"{name}_backward" for name in FORWARD)
BACKWARD_PRODUCTS = 2.5
"""How many times as many operations the backward has as the forward.

The forward has two matrix products. The backward computes the scores again, which is one product,
and has four more products.
"""


class Arguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def attention(device: str, arguments: Arguments) -> Tensor | None:
    """Run the fused attention kernel that PyTorch would use for these arguments, but on `meta`.

    The kernel is chosen by PyTorch's rules for CPUs, and for GPUs of the Ampere generation or
    newer. Older GPUs have no flash attention kernels, but their other kernels keep and move as many
    bytes.

    Args:
        device: The type of device whose kernel is chosen, "cuda" or "cpu".
        arguments: The arguments of `scaled_dot_product_attention`, with tensors on `meta`.

    Returns:
        The output, or `None` if PyTorch uses no fused kernel for these arguments.
    """
    query, key, value, mask, dropout, causal, scale, grouped = arguments
    heads = (query, key, value)
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or not query.is_floating_point():
        return None
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return None
    sizes = {query.shape[-1], key.shape[-1], value.shape[-1]}
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    aten = torch.ops.aten
    double = query.dtype is torch.float64
    flash = accelerator.KERNELS.flash_sdp_enabled() and len(sizes) == 1
    if device == "cpu":
        if not flash or grouped or dropout or double:
            return None
        made = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, dropout, causal, attn_mask=mask, scale=scale
        )
    elif flash and mask is None and query.dtype in HALVES and max(sizes) <= LARGEST_HEAD:
        made = aten._scaled_dot_product_flash_attention(*heads, dropout, causal, scale=scale)
    elif grouped or double or not accelerator.KERNELS.mem_efficient_sdp_enabled():
        return None
    else:
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        trained = query.requires_grad or key.requires_grad or value.requires_grad
        made = aten._scaled_dot_product_efficient_attention(
            *heads, mask, trained, dropout, causal, scale=scale
        )
    return made[0]  # type: ignore[no-any-return]


def attention_operator(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Operator | None:
    """Describe a fused attention kernel that ran as an `Operator`, with its operations and bytes.

    If the attention is causal, only the scores that the mask does not hide are counted.

    Args:
        func: The operator that ran.
        args: The positional arguments of the operator.
        kwargs: The keyword arguments of the operator.
        result: What the operator returned.

    Returns:
        The description, or `None` if the operator is not a fused attention kernel.
    """
    name = func.__name__.partition(".")[0]
    if name not in FORWARD and name not in BACKWARD:
        return None
    places = [argument.name for argument in func._schema.arguments]
    named = {**dict(zip(places, args, strict=False)), **kwargs}
    query, key, value = named["query"], named["key"], named["value"]
    batch, heads, rows, channels = query.shape
    columns = key.shape[-2]
    scores = rows * columns
    if named.get("is_causal"):
        square = min(rows, columns)
        scores = square * (square + 1) // 2 + max(0, rows - columns) * columns
    flops = 2.0 * batch * heads * scores * (channels + value.shape[-1])
    tensors = [*tensors_in((args, kwargs)), *tensors_in(result)]
    moved = float(sum(map(bytes_of, tensors)))
    if name in FORWARD:
        return Operator("attention", dtype_of(query), flops, moved)
    return Operator("attention_backward", dtype_of(query), BACKWARD_PRODUCTS * flops, moved)
