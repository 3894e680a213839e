"""What was counted already: layers that behave alike are measured once, and operators on alike tensors run once.

PyTorch works out many shapes in Python, which takes most of the time of counting, and the layers of a model are alike.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.trace.parts import tensors_in

T = TypeVar("T")


class Alike:
    """Remember what was measured of layers, by how they behave; of one model, or of several."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Any, TensorOrTensors]] = {}
        self._layers: dict[
            int, tuple[torch.nn.Module, object]
        ] = {}  # by id, which stays theirs while it is held
        self._how: object = None

    def begin(self, module: torch.nn.Module, device: str) -> None:
        """Go on with the layers of this module, counted as they run on this type of device, as PyTorch is set now.

        They are copied for training if it is not (`placed_copy`).
        """
        self._layers.clear()
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        precisions = (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,
        )  # type: ignore[attr-defined]
        self._how = module.training, device, autocast, precisions

    def once(
        self, measure: Callable[[Rehearsal], T], rehearsal: Rehearsal, more: object = None
    ) -> T:
        """Return what `measure` finds, but do not run a layer that behaves as one that was measured, with `more` equal.

        Other measurements have another `more`.
        """
        key = self.behaviour(rehearsal.original, rehearsal.value, more)
        if key is None:
            return measure(rehearsal)
        if key not in self._known:
            found = measure(rehearsal)
            self._known[key] = found, rehearsal.output
        found, rehearsal.output = self._known[key]
        return found

    def behaviour(
        self, layer: torch.nn.Module, value: TensorOrTensors, more: object = None
    ) -> object:
        """Return what is equal for layers that behave alike on such values: all their state but tensors' contents.

        `None` for layers with skips, and for those that cannot be pickled, which may do anything.
        """
        if id(layer) not in self._layers:
            self._layers[id(layer)] = layer, _state(layer)
        state = self._layers[id(layer)][1]
        numbers: dict[int, int] = {}
        looks = [_looks(x, numbers) for x in tensors_of(value)]
        return (
            None if state is None else (state, self._how, isinstance(value, Tensor), *looks, more)
        )


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
    return (
        x.shape,
        x.dtype,
        x.stride(),
        x.storage_offset(),
        x.requires_grad,
        storage.nbytes(),
        number,
    )


class _Shapes(pickle.Pickler):
    """Write no tensor, only what it looks like, and which of those written before share its storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[
            int, int
        ] = {}  # address of a storage, which the pickled tensors keep alive -> its number

    def persistent_id(self, item: object) -> object:
        if not isinstance(item, Tensor):
            return None
        return str(_looks(item, self._numbers))


class Remembered(TorchDispatchMode):
    """Answer operators from memory in this thread, unless they return views or what they were given.

    Results are new tensors, each with a storage of its own, as they would be.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[object, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            key = _key(func, args, kwargs)
            if key in self._known:
                return _again(self._known[key])
            result = func(*args, **kwargs)
            if key is not None and _made(result, list(tensors_in((args, dict(kwargs))))):
                self._known[key] = _again(result)
            return result


def _key(func: Any, args: Any, kwargs: Any) -> object:
    """Return what decides the result, or `None` where it has to be computed."""
    schema = getattr(func, "_schema", None)
    if schema is None or any(x.alias_info is not None for x in schema.returns):
        return None
    try:
        key = (func, _described(args), _described(tuple(kwargs.items())))
        hash(key)
    except (TypeError, RuntimeError):
        return None
    return key


def _described(item: Any) -> Any:
    if isinstance(item, Tensor):
        if not item.is_meta or type(item) not in (Tensor, torch.nn.Parameter):
            raise TypeError("not on meta")
        return ("tensor", item.shape, item.stride(), item.dtype, item.is_conj(), item.is_neg())
    if isinstance(item, (tuple, list)):
        return tuple(map(_described, item))
    return (type(item), item)


def _made(result: Any, given: list[Tensor]) -> bool:
    """Return whether the result is plain tensors, each with a storage of its own that is just as large."""
    made = [x for x in (result if type(result) in (tuple, list) else [result]) if x is not None]
    if not all(isinstance(x, Tensor) and x.is_meta and x.layout is torch.strided for x in made):
        return False
    apart = {id(x.untyped_storage()) for x in made} - {id(x.untyped_storage()) for x in given}
    pairs = zip(made, _again(made), strict=True)
    return len(apart) == len(made) and all(
        a.untyped_storage().nbytes() == b.untyped_storage().nbytes() for a, b in pairs
    )


def _again(result: Any) -> Any:
    """Return new tensors that look like these."""
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return None if result is None else type(result)(map(_again, result))
