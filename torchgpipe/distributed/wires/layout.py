"""How tensors are placed in memory, and what of that a wire sends.

A received tensor is placed as the sent one was, gaps and repetitions included, since PyTorch adds up in another order
where it is not. Neither gaps nor repetitions travel.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """A tensor's type, shape, strides, and bytes that go over gloo: none if it is on `meta`, and so comes by NCCL."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bytes: int
    meta: bool


def layout_of(x: Tensor) -> Layout:
    """Return the layout of a tensor whose elements have memory of their own, but for `expand`."""
    return Layout(
        x.dtype, tuple(x.shape), x.stride(), 0 if x.is_meta else once(x).nbytes, x.is_meta
    )


@torch.inference_mode(False)  # there tensors would not count their changes, which may be refused
def placed(layout: Layout, rows: Iterator[Tensor]) -> Tensor:
    """Return a tensor of this layout; its contents are the next of `rows`, if it has any."""
    content = next(rows) if layout.bytes else None
    reach = 1 + sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    if content is not None and reach * layout.dtype.itemsize == layout.bytes:
        x = torch.empty(0, dtype=layout.dtype, device="cpu")
        return x.set_(content.untyped_storage(), 0, layout.shape, layout.stride)
    device = "meta" if layout.meta else "cpu"
    x = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    if content is not None:
        distinct = once(x)
        distinct.copy_(content.view(layout.dtype).view(distinct.shape))
    return x


def once(x: Tensor) -> Tensor:
    """Return the tensor without the repetitions of `expand`."""
    for d, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if n > 1 and step == 0:
            x = x.narrow(d, 0, 1)
    return x


def disjoint(x: Tensor) -> Tensor:
    """Return the tensor as it is in memory, or a copy if some memory is of several elements, but for `expand`."""
    x = _plain(x)
    reach = 1
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and step:
            if step < reach:
                return x.contiguous()
            reach += (n - 1) * step
    return x


def _plain(x: Tensor) -> Tensor:
    if (
        type(x) not in (Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or x.is_quantized
    ):
        kind = type(x).__name__ if x.layout is torch.strided else f"tensor of {x.layout}"
        raise TypeError(
            f"only dense tensors travel between ranks, but a partition returned a {kind}"
        )
    return x.detach().resolve_conj().resolve_neg()


def dense(x: Tensor) -> Tensor:
    """Return the tensor without gaps in its memory; itself, detached, where it has none."""
    x = _plain(x)
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return x.contiguous()


def row(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in a row, as they are in memory."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
