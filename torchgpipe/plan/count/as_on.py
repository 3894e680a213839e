"""Let operators on `meta` run as they would on a device: with its fused kernels, and under its autocast."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchgpipe.plan.count.attention import attention
from torchgpipe.plan.count.autocast import cast

WRITTEN_IN_PYTHON = ("torch.nn.functional", "torch.functional")
CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def as_on(device: str, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Follow, in this thread, what PyTorch does on a type of device: "cuda" or "cpu".

    Operators are cast while autocast is enabled for that type; `autocast` enables it, with this type of numbers.
    """
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    if autocast is not None:  # not by `torch.autocast`, which refuses a device that is not here
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, autocast)
    try:
        with _AsOn(device):
            yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class _AsOn(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (body := _body(func)) is not None:
            with self:  # which is off while it answers
                return body(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled(self.device):
            args, kwargs = cast(self.device, name, args, kwargs)
        if name == "scaled_dot_product_attention":
            result = attention(self.device, *args, **kwargs)
            if result is not None:
                return result
        if func is torch.dropout and self.device == "cuda" and _drops(*args, **kwargs):
            return torch.native_dropout(*args, **kwargs)[0]  # one kernel, and a mask of bytes
        return func(*args, **kwargs)


def _drops(input: torch.Tensor, p: float, train: bool) -> bool:
    return train and 0 < p < 1 and input.numel() > 0


@functools.cache
def _body(func: Any) -> Callable[..., Any] | None:
    """Return a function of these modules, which are written in Python, without its check for modes; or `None`.

    `torch.nn.functional.multi_head_attention_forward` is one. It asks the modes first. If a mode answers by calling it,
    that mode does not see the operators within.
    """
    if not isinstance(func, FunctionType) or func.__globals__["__name__"] not in WRITTEN_IN_PYTHON:
        return None
    unchecked = {**func.__globals__, **dict.fromkeys(CHECKS, lambda *_: False)}
    body = FunctionType(func.__code__, unchecked, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
