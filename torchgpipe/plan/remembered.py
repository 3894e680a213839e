"""Run operators on `meta` once: where the same comes in, the same comes out.

PyTorch works many shapes out in Python, which takes most of the time of counting; and the layers of a model are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe._autograd import without_torch_function
from torchgpipe.plan.operators import tensors_in

__all__ = ["Remembered"]


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
        key = _key(func, args, kwargs)
        if key in self._known:
            return _made(self._known[key])
        result = func(*args, **kwargs)
        if key is not None:
            like = _like(result, {id(x.untyped_storage()) for x in tensors_in((args, dict(kwargs)))})
            if like is not None:
                self._known[key] = like
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
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
        return tuple(_described(x) for x in item)
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
