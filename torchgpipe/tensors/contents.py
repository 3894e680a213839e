"""Copy buffers of modules, and later compare the buffers with the copies."""

import copy
import threading
from collections import UserDict
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor

from torchgpipe.tensors.microbatch import carrying


def copied(buffer: Tensor | None, shared: bool, copies: dict[Any, Any]) -> Tensor | None:
    """Return a buffer's copy from `copies`; if there is none, make a copy and add it to `copies`.

    Args:
        buffer: The buffer, or `None`, for which the result is `None`.
        shared: Whether other buffers share the buffer's memory. Then the copies of all of them
            share memory, too.
        copies: Maps the id of each buffer that was copied before to its copy.
    """
    if buffer is not None and id(buffer) not in copies:
        made = copy.deepcopy(buffer.detach(), copies) if shared else buffer.detach().clone()
        copies[id(buffer)] = carrying(made, buffer)
    return copies.get(id(buffer))


class BuffersOfThread(UserDict[str, Tensor | None]):
    """A dictionary of a module's buffers whose contents depend on the thread that reads it.

    While a thread recomputes a task, it sees copies of the buffers, and all other threads see the
    real buffers.

    Args:
        own: The buffers that the current thread, which makes this dictionary, will see.
        others: The buffers that all other threads see: the real buffers of the module.
    """

    def __init__(self, own: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> None:
        self._thread = threading.get_ident()
        self._own, self._others = own, others

    def __reduce__(self) -> Any:
        """Let `copy` and `pickle` make a plain dictionary of the buffers of this thread."""
        return dict, (self.copy(),)

    def copy(self) -> dict[str, Tensor | None]:  # type: ignore[override]
        """Return a plain dictionary of the buffers that this thread sees."""
        return dict(self.data)

    @property
    def data(self) -> dict[str, Tensor | None]:  # type: ignore[override]
        """The dictionary that `UserDict` reads and writes."""
        return self._own if threading.get_ident() == self._thread else self._others


def comparable(x: Tensor) -> bool:
    """Return whether `equal` can compare this tensor: it must not be sparse or nested."""
    return x.layout is torch.strided and not x.is_nested


def equal(x: Tensor, y: Tensor) -> bool | None:
    """Return whether two buffers have the same bits, or `None` if they are sparse or nested.

    Buffers on device `meta` have no values, so they count as equal.
    """
    if x.is_meta or not comparable(x):
        return x.is_meta or None
    if x.is_cpu and x.nbytes <= 4096 and x.is_contiguous() and y.is_contiguous():
        # For small buffers, this takes less time than an operator of PyTorch.
        ours = string_at(x.data_ptr(), x.nbytes)
        theirs = string_at(y.data_ptr(), y.nbytes)
        return ours == theirs
    return torch.equal(_bits(x.detach()), _bits(y))


def _bits(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    # As floats, NaN does not equal NaN, and -0.0 equals 0.0. So compare bits.
    return x.view(getattr(torch, f"int{8 * x.itemsize}")) if x.is_floating_point() else x
