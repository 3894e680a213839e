"""Run operators on `meta` once, and remember what their results look like: for the same inputs they are the same.

PyTorch works out many shapes in Python, which takes most of the time of counting, and the layers of a model are alike.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in


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
    storages = {id(x.untyped_storage()) for x in given}
    for x in made:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        whole = (last + 1) * x.element_size() if x.numel() else 0
        if x.untyped_storage().nbytes() != whole or id(x.untyped_storage()) in storages:
            return False
        storages.add(id(x.untyped_storage()))
    return True


def _again(result: Any) -> Any:
    """Return new tensors that look like these."""
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return None if result is None else type(result)(map(_again, result))
