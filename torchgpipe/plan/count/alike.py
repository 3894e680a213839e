"""Tell which layers behave alike, so that one of them is measured for all."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of

if TYPE_CHECKING:
    from torchgpipe.plan.count.footprint import Footprint, LayerCount


class Alike:
    """Remember what was measured of layers, by how they behave; of one model, or of several.

    What is remembered holds for layers that behave alike: `counts` what `count` needs, `footprints` what memory needs.
    """

    def __init__(self) -> None:
        self.counts: dict[object, tuple[LayerCount, TensorOrTensors]] = {}
        self.footprints: dict[object, tuple[Footprint, TensorOrTensors]] = {}
        self._layers: dict[int, tuple[torch.nn.Module, object]] = {}  # by id, which stays theirs while it is held
        self._how: object = None

    def begin(self, module: torch.nn.Module, device: str, autocast: torch.dtype | None) -> None:
        """Go on with the layers of this module, counted as they run on this type of device, as PyTorch is set now.

        They are copied for training if it is not (`placed_copy`).
        """
        self._layers.clear()
        if autocast is None and device != "meta" and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        precisions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        self._how = module.training, device, autocast, precisions

    def behaviour(self, layer: torch.nn.Module, value: TensorOrTensors, more: object = None) -> object:
        """Return what is equal for layers that behave alike on such values: all their state but tensors' contents.

        `None` for layers with skips, and for those that cannot be pickled, which may do anything.
        """
        if id(layer) not in self._layers:
            self._layers[id(layer)] = layer, _state(layer)
        state = self._layers[id(layer)][1]
        numbers: dict[int, int] = {}
        looks = [_looks(x, numbers) for x in tensors_of(value)]
        return None if state is None else (state, self._how, isinstance(value, Tensor), *looks, more)


def _state(layer: torch.nn.Module) -> object:
    if any(skips_of(layer)):
        return None
    written = io.BytesIO()
    try:
        _Shapes(written).dump(layer)
    except Exception:
        return None
    return written.getvalue()


def _looks(x: Tensor, numbers: dict[int, int]) -> object:
    """Return what a tensor looks like; `numbers` counts the storages that were met, by their addresses."""
    storage = x.untyped_storage()
    number = numbers.setdefault(storage._cdata, len(numbers))
    return x.shape, x.dtype, x.stride(), x.storage_offset(), x.requires_grad, storage.nbytes(), number


class _Shapes(pickle.Pickler):
    """Write no tensor, only what it looks like, and which of those written before share its storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}  # address of a storage, which the pickled tensors keep alive -> its number

    def persistent_id(self, item: object) -> object:
        if not isinstance(item, Tensor):
            return None
        return str(_looks(item, self._numbers))
