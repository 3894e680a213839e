"""Notice storages as operators return them, and forget them when they die: which bytes are alive, and when."""

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan.count.footprint import SUMMED, Change
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.trace.parts import tensors_in


class Live(TorchDispatchMode):
    """Note every storage that comes to life or dies in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._known: dict[int, int | None] = {}
        self.gradients: set[int] = set()
        """The storages of the parameters' gradients."""
        self._summed: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Count neither life nor death of tensors that the caller holds anyway."""
        self._known.update((id(x.untyped_storage()), None) for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            result = func(*args, **kwargs)
            in_place = func is torch.ops.aten.add_.Tensor and isinstance(args[1], Tensor)
            if in_place and id(args[0].untyped_storage()) in self.gradients:
                self._summed.add(id(args[1].untyped_storage()))
            for x in tensors_in(result):
                storage = x.untyped_storage()
                if id(storage) not in self._known:
                    self.changes.append(Change(float(storage.nbytes()), None))
                    self.enter(x, None)
            return result

    def enter(self, x: Tensor, number: int | None) -> None:
        """Note the death of a tensor's storage; of one that entered the layer, by its number."""
        storage = x.untyped_storage()
        self._known[id(storage)] = number
        weakref.finalize(storage, self._forget, id(storage), float(storage.nbytes())).atexit = False

    def _forget(self, key: int, nbytes: float) -> None:
        number = self._known.pop(key, None)
        self.changes.append(Change(-nbytes, SUMMED if key in self._summed else number))
        self._summed.discard(key)

    def peak(self) -> float:
        """Return the most bytes since it began, those that entered apart."""
        made = [change.bytes for change in self.changes if change.storage is None]
        return max(accumulate(made, initial=0.0))
