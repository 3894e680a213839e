"""Tell which layers behave alike, so that one of them is measured for all."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from torchgpipe.skip.skippable import skips_of

__all__ = ["behaviour"]


def behaviour(layer: torch.nn.Module, value: Any, more: object = None) -> object:
    """Return what is equal for layers that behave alike: all their state but the contents of tensors.

    `None` for layers with skips, and for those that cannot be pickled, which may do anything.
    """
    if any(skips_of(layer)):
        return None
    written = io.BytesIO()
    try:
        _Shapes(written).dump((layer, value, more))
    except Exception:
        return None
    return written.getvalue()


class _Shapes(pickle.Pickler):
    """Write no tensor, only what it looks like, and which of those written before share its storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}  # address of a storage, which the pickled tensors keep alive -> its number

    def persistent_id(self, item: object) -> object:
        if not isinstance(item, Tensor):
            return None
        storage = item.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        looks = (item.shape, item.dtype, item.stride(), item.storage_offset(), item.requires_grad)
        return str((*looks, storage.nbytes(), number))
