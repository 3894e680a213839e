"""Run fused attention on `meta` as a device would, and count it as one operator.

On each kind of device PyTorch has its own kernels for `scaled_dot_product_attention`. On `meta` it has none, and takes
several plain operators instead, which keep the matrix of all scores. No fused kernel ever writes that to memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.plan.hardware.operators import Operator, bytes_of, dtype_of
from torchgpipe.trace.parts import tensors_in

HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""Channels of a head, for which there are flash kernels."""
FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
BACKWARD = tuple(f"{name}_backward" for name in FORWARD)
BACKWARD_PRODUCTS = 2.5
"""Its products over those of forward: it computes the scores again, and then four products in place of two."""


def attention(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return what `scaled_dot_product_attention` would by the fused kernel that it takes on a type of device.

    `None` where it takes none. Which one it takes is PyTorch's rule for CPUs, and for GPUs since Ampere; older ones
    have no flash kernels, but the others keep and move as much.
    """
    aten, mask = torch.ops.aten, attn_mask
    heads = (query, key, value)
    dtypes, sizes = {x.dtype for x in heads}, {x.shape[-1] for x in heads}
    if any(x.dim() != 4 for x in heads) or len(dtypes) > 1 or not query.is_floating_point():
        return None
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    flash = torch.backends.cuda.flash_sdp_enabled() and len(sizes) == 1
    if device == "cpu":
        if not flash or enable_gqa or dropout_p or query.dtype is torch.float64:
            return None
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            *heads, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    if flash and mask is None and query.dtype in HALVES and max(sizes) <= LARGEST_HEAD:
        return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            *heads, dropout_p, is_causal, scale=scale
        )[0]
    if (
        enable_gqa
        or query.dtype is torch.float64
        or not torch.backends.cuda.mem_efficient_sdp_enabled()
    ):
        return None
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    trained = any(x.requires_grad for x in heads)
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        *heads, mask, trained, dropout_p, is_causal, scale=scale
    )[0]


def attention_operator(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Operator | None:
    """Return what a fused kernel does, or `None` if the operator is none.

    Of a causal mask, the half of the scores that it hides is not computed.
    """
    name = func.__name__.partition(".")[0]
    if name not in FORWARD + BACKWARD:
        return None
    named = {
        argument.name: x for argument, x in zip(func._schema.arguments, args, strict=False)
    } | dict(kwargs)
    query, key, value = named["query"], named["key"], named["value"]
    rows, columns = query.shape[-2], key.shape[-2]
    scores = rows * columns
    if named.get("is_causal"):
        square = min(rows, columns)
        scores = square * (square + 1) // 2 + max(0, rows - columns) * columns
    flops = 2.0 * query.shape[0] * query.shape[1] * scores * (query.shape[-1] + value.shape[-1])
    moved = float(sum(map(bytes_of, (*tensors_in((args, dict(kwargs))), *tensors_in(result)))))
    if name in FORWARD:
        return Operator("attention", dtype_of(query), flops, moved)
    return Operator("attention_backward", dtype_of(query), BACKWARD_PRODUCTS * flops, moved)
