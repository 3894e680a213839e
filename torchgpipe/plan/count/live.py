"""Record the bytes of each allocation and release of memory, in order, while operators run."""

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
    """Within this context, record each storage that this thread's operators allocate.

    The release of each storage is recorded, too, so that the memory in use is known at any time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._known: dict[int, int | None] = {}
        """Maps the ids of the storages that are alive to their numbers."""
        self.gradients: set[int] = set()
        """The ids of the storages of the parameters' gradients."""
        self._summed: set[int] = set()
        """The ids of the storages that were added to the parameters' gradients."""

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """From now on, do not record these tensors, which outlive the run, such as parameters."""
        for x in tensors:
            self._known[id(x.untyped_storage())] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            result = func(*args, **kwargs or {})
            adds = func is torch.ops.aten.add_.Tensor and isinstance(args[1], Tensor)
            if adds and id(args[0].untyped_storage()) in self.gradients:
                self._summed.add(id(args[1].untyped_storage()))
            for x in tensors_in(result):
                storage = x.untyped_storage()
                if id(storage) not in self._known:
                    self.changes.append(Change(float(storage.nbytes()), None))
                    self.enter(x, None)
            return result

    def enter(self, x: Tensor, number: int | None) -> None:
        """Watch a tensor's storage from now on, to record when the storage is freed.

        Args:
            x: The tensor.
            number: The number of the storage if `x` is an input of the layer, otherwise `None`.
        """
        storage = x.untyped_storage()
        key, nbytes = id(storage), float(storage.nbytes())
        self._known[key] = number
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: float) -> None:
        number = self._known.pop(key, None)
        if key in self._summed:
            self._summed.discard(key)
            number = SUMMED
        self.changes.append(Change(-nbytes, number))

    def peak(self) -> float:
        """Return the largest number of bytes allocated at once, without the layer's inputs."""
        made = [change.bytes for change in self.changes if change.storage is None]
        return max(accumulate(made, initial=0.0))
