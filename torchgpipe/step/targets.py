"""Targets: each micro-batch has its part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchgpipe.tensors.microbatch import together


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return each micro-batch's part of a target.

    Tensors are split in tuples, lists and dictionaries, as deep as these go. Everything else is for
    all micro-batches.

    Args:
        target: The target of the mini-batch.
        sizes: How many samples each micro-batch has.

    Raises:
        ValueError: A tensor has another batch size (dimension 0).
    """
    if isinstance(target, Tensor):
        if len(sizes) == 1:
            return [target]
        if not target.dim() or len(target) != sum(sizes):
            raise ValueError(
                f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension "
                f"0, but one has the shape {tuple(target.shape)}"
            )
        return list(target.split([*sizes]))
    if not isinstance(target, dict | list | tuple) or not target:
        return [target] * len(sizes)
    values = target.values() if isinstance(target, dict) else target
    columns = [parted(x, sizes) for x in values]
    parts: list[Any] = []
    for row in zip(*columns, strict=True):
        if isinstance(target, dict):
            parts.append(dict(zip(target, row, strict=True)))
        elif isinstance(target, list):
            parts.append(list(row))
        else:
            parts.append(together(type(target), row))
    return parts
