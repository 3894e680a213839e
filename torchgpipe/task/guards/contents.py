"""What buffers hold: copy it, and see whether it is still the same."""

import copy
import threading
from collections import UserDict
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor

from torchgpipe.tensors.microbatch import carrying


def copied(buffer: Tensor | None, shared: bool, copies: dict[Any, Any]) -> Tensor | None:
    """Return a copy of a buffer; a buffer that has two places has one copy.

    Copies of buffers that are `shared` share memory as the buffers do.
    """
    if buffer is not None and id(buffer) not in copies:
        made = copy.deepcopy(buffer.detach(), copies) if shared else buffer.detach().clone()
        copies[id(buffer)] = carrying(made, buffer)
    return copies.get(id(buffer))


class BuffersOfThread(UserDict[str, Tensor | None]):
    """The buffers of a module: in the thread that makes this, its `own`, in others the module's."""

    def __init__(self, own: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> None:
        self._thread = threading.get_ident()
        self._own, self._others = own, others

    def __reduce__(self) -> Any:
        """Copy and pickle a plain dictionary of what this thread finds, as that outlives this."""
        return dict, (self.copy(),)

    def copy(self) -> dict[str, Tensor | None]:  # type: ignore[override]
        """Return a plain dictionary."""
        return dict(self.data)

    @property
    def data(self) -> dict[str, Tensor | None]:  # type: ignore[override]
        """The dictionary that `UserDict` reads and writes."""
        return self._own if threading.get_ident() == self._thread else self._others


def comparable(x: Tensor) -> bool:
    """Return whether `equal` knows this kind of tensor."""
    return x.layout is torch.strided and not x.is_nested


def equal(x: Tensor, y: Tensor) -> bool | None:
    """Return whether two buffers hold the same bits, or `None` if that is not known.

    On device `meta` all do.
    """
    if x.is_meta or not comparable(x):
        return x.is_meta or None
    if x.is_cpu and x.nbytes <= 4096 and x.is_contiguous() and y.is_contiguous():
        return string_at(x.data_ptr(), x.nbytes) == string_at(
            y.data_ptr(), y.nbytes
        )  # takes less than an operator
    return torch.equal(_bits(x.detach()), _bits(y))


def _bits(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    # NaN is not equal to NaN, but -0.0 to 0.0.
    return x.view(getattr(torch, f"int{8 * x.itemsize}")) if x.is_floating_point() else x
