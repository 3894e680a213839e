"""Caches that make counting faster, because many layers of a model are alike.

`Alike` keeps the measured costs of a layer. They are also the costs of all layers that behave like
it. `Remembered` keeps the shapes of operators' results. This saves time, because PyTorch infers
shapes on `meta` in Python code, which is slow.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.plan.count.unnamed import tensor_of, unnamed
from torchgpipe.skip.scope import Scope
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.tensors.microbatch import Structured, TensorOrTensors, tensors_of
from torchgpipe.trace.code.call import Held, Value
from torchgpipe.trace.layer import Layer
from torchgpipe.trace.parts import tensors_in

T = TypeVar("T")
EMPTY: Scope = {}


class Alike:
    """A cache of measurements of layers. Layers that behave alike share one measurement."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Any, TensorOrTensors, list[Tensor | None]]] = {}
        """Measurements, outputs and stashed skips of layers, by their behaviour."""
        self._layers: dict[int, tuple[Module, object]] = {}
        """Layers and their states, by the layers' ids. Holding the layers keeps the ids valid."""
        self._how: object = None

    def begin(self, module: Module, device: str) -> None:
        """Prepare the cache for the layers of another module.

        PyTorch's present settings for autocast and for the precision of float32 products become a
        part of every key, because the measurements depend on them.

        Args:
            module: The module. Its training mode is also a part of every key (see `placed_copy`).
            device: The type of device on which the layers run.
        """
        self._layers.clear()
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        precisions = (
            accelerator.KERNELS.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        )
        self._how = module.training, device, autocast, precisions

    def once(
        self, measure: Callable[[Rehearsal], T], rehearsal: Rehearsal, more: object = None
    ) -> T:
        """Measure a layer, or return the cached measurement of a layer that behaves alike.

        Args:
            measure: A function that runs the layer and measures something.
            rehearsal: The layer and its input. Even if this method does not run the layer, it
                stores in this `Rehearsal` the layer's output and the skips that the layer stashes.
            more: An additional part of the key in the cache, with everything else that the result
                depends on. It must differ for different kinds of measurements.
        """
        layer = rehearsal.original
        key = self.behaviour(layer, rehearsal.value, more, skips=rehearsal.skips)
        if key is None:
            return measure(rehearsal)
        if key not in self._known:
            found = measure(rehearsal)
            self._known[key] = found, rehearsal.output, list(rehearsal.scope.values())
        found, rehearsal.output, skips = self._known[key]
        stashes = layer.stashes if isinstance(layer, Layer) else ()
        rehearsal.scope = dict(zip(stashes, skips, strict=True))
        return found

    def behaviour(
        self, layer: Module, value: TensorOrTensors, more: object = None, *, skips: Scope = EMPTY
    ) -> object:
        """Return a key for a layer in the cache. Layers that behave alike have equal keys.

        The key describes all state of the layer and the shapes of its inputs. It has no contents of
        tensors, and not the names of the layer and its parts. It is `None` if the layer cannot be
        compared with others: if it cannot be pickled, or has skips and is not a layer of a traced
        module.

        Args:
            layer: The layer.
            value: The input of the layer; its contents make no difference.
            more: An additional part of the key.
            skips: The skips that the layer pops; their contents make no difference.
        """
        if id(layer) not in self._layers:
            self._layers[id(layer)] = layer, _state(layer)
        _, state = self._layers[id(layer)]
        if state is None or isinstance(value, Structured):
            return None
        numbers: dict[int, int] = {}
        looks = [_looks(x, numbers) for x in tensors_of(value)]
        looks += [None if x is None else _looks(x, numbers) for x in skips.values()]
        return (state, self._how, isinstance(value, Tensor), *looks, more)


def _state(layer: Module) -> object:
    if any(skips_of(layer)) and not isinstance(layer, Layer):
        return None
    written = io.BytesIO()
    try:
        _Shapes(written, layer).dump(unnamed(layer) if isinstance(layer, Layer) else layer)
    except Exception:
        return None
    return written.getvalue()


def _looks(x: Tensor, numbers: dict[int, int]) -> object:
    """Describe a tensor without its contents: its shape, dtype, strides, storage and so on.

    The storage is described by its size and a number, which shows which tensors share a storage.
    `numbers` maps the addresses of storages to their numbers. New storages are added to it.
    """
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
    """Pickle a layer, but write a description in place of each tensor (see `_looks`).

    Thus two layers that differ only in the contents of tensors give equal pickles. The descriptions
    also show which tensors share a storage. In a layer of a traced module, the placeholders of
    values are numbered anew, in the order in which they are first used.
    """

    def __init__(self, file: io.BytesIO, layer: Module) -> None:
        super().__init__(file)
        self._layer = layer
        self._numbers: dict[int, int] = {}
        """Maps addresses of storages to numbers. The pickled tensors keep the storages alive."""
        self._placeholders: dict[Value, int] = {}

    def persistent_id(self, item: object) -> object:
        if isinstance(item, Value):
            return "value", self._placeholders.setdefault(item, len(self._placeholders))
        if isinstance(item, Held) and isinstance(self._layer, Layer):
            item = tensor_of(self._layer, item)
        if not isinstance(item, Tensor):
            return None
        return str(_looks(item, self._numbers))


class Remembered(TorchDispatchMode):
    """Within this context, cache the results of this thread's operators on `meta`.

    The key in the cache is the operator, with the shapes and dtypes of its arguments. If the cache
    has a result, the operator does not run. Instead, new tensors are made with the same shapes and
    dtypes as the result's. Operators that return views or their own arguments are not cached.
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
            if key is not None and _made(result, list(tensors_in((args, kwargs)))):
                self._known[key] = _again(result)
            return result


def _key(func: Any, args: Any, kwargs: Any) -> object:
    """Return the key of an operator's call in the cache, or `None` if the call cannot be cached."""
    schema = getattr(func, "_schema", None)
    if schema is None or any(result.alias_info is not None for result in schema.returns):
        return None
    try:
        key = (func, _described(args), _described(tuple(kwargs.items())))
        hash(key)
    except (TypeError, RuntimeError):
        return None
    return key


def _described(item: Any) -> Any:
    if isinstance(item, Tensor):
        if not item.is_meta or type(item) not in (Tensor, Parameter):
            raise TypeError("not on meta")
        return ("tensor", item.shape, item.stride(), item.dtype, item.is_conj(), item.is_neg())
    if isinstance(item, (tuple, list)):
        return tuple(map(_described, item))
    return (type(item), item)


def _made(result: Any, given: list[Tensor]) -> bool:
    """Return whether a result can be cached, which means that `_again` can make tensors like it.

    The result of an operator cannot be cached if one of its tensors shares a storage with another
    tensor or with an argument of the operator (`given`), or has a larger storage than it needs.
    """
    items = result if type(result) in (tuple, list) else [result]
    storages = {id(x.untyped_storage()) for x in given}
    for x in items:
        if x is None:
            continue
        if not isinstance(x, Tensor) or not x.is_meta or x.layout is not torch.strided:
            return False
        storage = x.untyped_storage()
        if id(storage) in storages or storage.nbytes() != _again(x).untyped_storage().nbytes():
            return False
        storages.add(id(storage))
    return True


def _again(result: Any) -> Any:
    """Return new tensors on `meta`, with the shapes, strides and dtypes of a result's tensors."""
    if result is None:
        return None
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return type(result)(map(_again, result))
