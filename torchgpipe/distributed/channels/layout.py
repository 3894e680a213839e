"""The memory layout of tensors, and which part of a tensor's memory is sent to another rank.

A received tensor has the same strides as the tensor that was sent. With other strides, PyTorch
could add up its elements in another order, and round differently. Strides can leave gaps in the
memory, or repeat elements (`expand`). Gaps and repetitions are not sent.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """A tensor's type, shape and strides, and how the tensor is sent.

    Attributes:
        bytes: How many bytes are sent over gloo; 0 if NCCL transfers the tensor.
        meta: Whether NCCL transfers the tensor. Then a `meta` tensor describes it in the message.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bytes: int
    meta: bool


def layout_of(x: Tensor) -> Layout:
    """Return the layout of a tensor.

    The tensor's elements must not share memory, except for those that `expand` has repeated.
    """
    size = 0 if x.is_meta else once(x).nbytes
    return Layout(x.dtype, tuple(x.shape), x.stride(), size, x.is_meta)


# A tensor that is made in inference mode does not count in-place changes, and autograd refuses to
# save it for a backward.
@torch.inference_mode(False)
def placed(layout: Layout, rows: Iterator[Tensor]) -> Tensor:
    """Make a received tensor from its layout and from the bytes of its values.

    The bytes are the next element of `rows`, an iterator over tensors of bytes. But if NCCL
    transfers the tensor, nothing is taken from `rows`, and the result is a `meta` tensor.
    """
    dtype, shape, strides, size, meta = layout
    content = next(rows) if size else None
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if content is not None and reach * dtype.itemsize == size:
        x = torch.empty(0, dtype=dtype, device="cpu")
        return x.set_(content.untyped_storage(), 0, shape, strides)
    device = "meta" if meta else "cpu"
    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if content is not None:
        distinct = once(x)
        typed = content.view(dtype)
        distinct.copy_(typed.view(distinct.shape))
    return x


def once(x: Tensor) -> Tensor:
    """Return a view of the tensor without the repetitions that `expand` has added."""
    for d, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if n > 1 and step == 0:
            x = x.narrow(d, 0, 1)
    return x


def disjoint(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if some of its elements share memory.

    Elements that `expand` has repeated do not count: they are allowed to share memory.
    """
    x = _plain(x)
    reach = 1
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and step:
            if step < reach:
                return x.contiguous()
            reach += (n - 1) * step
    return x


def _plain(x: Tensor) -> Tensor:
    """Detach a tensor from its graph, and call `resolve_conj` and `resolve_neg` on it.

    Raises:
        TypeError: If the tensor is not a plain, dense tensor, but sparse or quantized, for example.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_quantized
    strided = x.layout is torch.strided
    if not plain or not strided:
        kind = type(x).__name__ if strided else f"tensor of {x.layout}"
        raise TypeError(
            f"only dense tensors can be sent between ranks, but a partition returned a {kind}"
        )
    return x.detach().resolve_conj().resolve_neg()


def dense(x: Tensor) -> Tensor:
    """Return the tensor, or a copy without gaps if the tensor's memory has gaps."""
    x = _plain(x)
    if x.is_contiguous():
        return x
    without_gaps = torch.empty_like(x, device="meta").stride()
    return x if without_gaps == x.stride() else x.contiguous()


def row(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in their order in memory."""
    elements = x.as_strided((x.numel(),), (1,))
    return elements.view(torch.uint8)
