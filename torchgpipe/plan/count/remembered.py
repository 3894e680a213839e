"""Run operators on `meta` once, and remember what their results look like: for the same inputs they are the same.

PyTorch works out many shapes in Python, which takes most of the time of counting, and the layers of a model are alike.
The results of operators that work element by element are known for all shapes at once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in


class _Like(NamedTuple):
    """What a tensor on `meta` looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Remembered(TorchDispatchMode):
    """Answer operators from memory in this thread, unless they return views or what they were given.

    Results are new tensors, each with a storage of its own, as they would be.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[object, object] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        shape = _common_shape(func, args, kwargs)
        key = _key(func, args, kwargs, shape)
        if key in self._known:
            known = self._known[key]
            if shape is not None and isinstance(known, torch.dtype):
                return torch.empty(shape, dtype=known, device="meta")
            return _made(known)
        result = func(*args, **kwargs)
        if shape is not None and key is not None and isinstance(result, Tensor):
            if result.is_meta and result.shape == shape and result.is_contiguous():
                self._known[key] = result.dtype
            return result
        if key is not None:
            like = _like(result, {id(x.untyped_storage()) for x in tensors_in((args, dict(kwargs)))})
            if like is not None:
                self._known[key] = like
        return result


def _common_shape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape of all tensors that an operator is given, if it works element by element.

    They have to be contiguous, without dimensions of one element, whose strides may be any.
    """
    if torch.Tag.pointwise not in getattr(func, "tags", ()):
        return None
    shape: torch.Size | None = None
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            if not x.dim() or min(x.shape) < 2 or not x.is_contiguous() or (shape is not None and x.shape != shape):
                return None
            shape = x.shape
        elif isinstance(x, (tuple, list)):
            return None
    return shape


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: torch.Size | None) -> object:
    """Return what decides the result, or `None` where it has to be computed; a `shape` in common decides nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or any(x.alias_info is not None for x in schema.returns):
        return None
    try:
        same = shape is not None
        key = (func, same, _described(args, same), _described(tuple(kwargs.items()), same))
        hash(key)
    except (TypeError, RuntimeError):
        return None
    return key


def _described(item: Any, same: bool) -> Any:
    if isinstance(item, Tensor):
        if not item.is_meta or type(item) not in (Tensor, torch.nn.Parameter):
            raise TypeError("not on meta")
        shape = None if same else (item.shape, item.stride())
        return ("tensor", shape, item.dtype, item.is_conj(), item.is_neg())
    if isinstance(item, (tuple, list)):
        return tuple(_described(x, same) for x in item)
    return (type(item), item)


def _like(result: Any, given: set[int]) -> object:
    """Return how to make the result again, or `None` where a tensor is no plain one with a storage of its own.

    `given` has the storages of what the operator was given, by their ids.
    """
    if type(result) in (tuple, list):
        items = []
        for x in result:
            items.append(None if x is None else _like(x, given))
            if x is not None and items[-1] is None:
                return None
            given = given | {id(y.untyped_storage()) for y in tensors_in(x)}
        return type(result)(items)
    if not isinstance(result, Tensor) or not result.is_meta or result.layout is not torch.strided:
        return None
    last = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
    whole = (last + 1) * result.element_size() if result.numel() else 0
    if result.untyped_storage().nbytes() != whole or id(result.untyped_storage()) in given:
        return None
    return _Like(tuple(result.shape), tuple(result.stride()), result.dtype)


def _made(like: Any) -> Any:
    if like is None or isinstance(like, _Like):
        return like and like.new()
    return type(like)(_made(x) for x in like)
