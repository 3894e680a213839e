"""Notice storages as operators return them, and forget them when they die: which bytes are alive, and when."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan.footprint import SUMMED, Change
from torchgpipe.plan.operators import tensors_in

__all__ = ["Live"]


class Live(TorchDispatchMode):
    """Note every storage that comes to life or dies in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._known: set[int] = set()
        self.gradients: set[int] = set()
        """The storages of the parameters' gradients."""
        self._summed: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Count neither life nor death of tensors that the caller holds anyway."""
        self._known.update(id(x.untyped_storage()) for x in tensors)

    def enter(self, x: Tensor | None, number: int) -> None:
        """Note the death of a storage that entered the layer."""
        if x is not None:
            self._watch(x.untyped_storage(), number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        in_place = func is torch.ops.aten.add_.Tensor and isinstance(args[1], Tensor)
        if in_place and id(args[0].untyped_storage()) in self.gradients:
            self._summed.add(id(args[1].untyped_storage()))
        for x in tensors_in(result):
            storage = x.untyped_storage()
            if id(storage) not in self._known:
                self.changes.append(Change(float(storage.nbytes()), None))
                self._watch(storage, None)
        return result

    def _watch(self, storage: torch.UntypedStorage, number: int | None) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        weakref.finalize(storage, self._forget, id(storage), float(storage.nbytes()), number).atexit = False

    def _forget(self, key: int, nbytes: float, number: int | None) -> None:
        self._known.discard(key)
        self.changes.append(Change(-nbytes, SUMMED if key in self._summed else number))
        self._summed.discard(key)

    def peak(self) -> float:
        """Return the most bytes since it began."""
        live = most = 0.0
        for change in self.changes:
            live += change.bytes
            most = max(most, live)
        return most
