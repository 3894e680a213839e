"""Count the bytes of all live tensors, for devices whose allocator does not count them.

The storage of a tensor is counted from the time when an operator returns the tensor until the
storage is freed. Operators of all threads are counted.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.trace.parts import tensors_in


class LiveBytes:
    """A counter of the bytes of live tensors on each (emulated) device, now and at the peak.

    A storage counts once, with all its bytes, from the time when it is first seen until it is
    freed. It belongs to a device as follows:

    - A storage that is passed to `add` belongs to the device that is passed with it.
    - A storage that a task of the pipeline makes belongs to the device of the task.
    - Other storages, such as those of an optimizer's state, are made by operators outside of tasks.
      Each belongs to the device of the operator's first argument that has a known storage.
    """

    def __init__(self, devices: int) -> None:
        self.live = [0] * devices
        self.peak = [0] * devices
        self._known: dict[int, tuple[int, int]] = {}  # id of a storage -> its device, its bytes
        self._lock = threading.RLock()  # reentrant: `add` may free a storage, which calls `_forget`
        self.inner = threading.local()  # `.device`: the device of this thread's innermost mode

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the device of the first tensor that has a known storage, or the first device."""
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            found = self._known.get(key)
            if found is not None:
                device, _ = found
                return device
        return 0

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count tensors on a device, unless their storage is already known.

        If a known storage has grown, update its size.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            size = storage.nbytes()
            with self._lock:
                if key in self._known:
                    owner, before = self._known[key]
                else:
                    owner, before = device, 0
                    freed = weakref.finalize(storage, self._forget, key)
                    freed.atexit = False
                self._known[key] = (owner, size)
                self.live[owner] += size - before
                self.peak[owner] = max(self.peak[owner], self.live[owner])

    def _forget(self, key: int) -> None:
        with self._lock:
            device, size = self._known.pop(key)
            self.live[device] -= size


class LiveBytesMode(TorchDispatchMode):
    """A mode that adds the results of this thread's operators to a `LiveBytes` counter.

    A result counts on `device` or, if `device` is None, on the device of the operator's arguments.
    If such a mode is active within another one, only the device of the inner mode is used.
    """

    only_watches = True

    def __init__(self, counter: LiveBytes, device: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = self.counter.inner
        before = getattr(inner, "device", None)
        device = self.device if before is None else before
        inner.device = device
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            inner.device = before
        if device is None:
            device = self.counter.device_of(tensors_in((args, kwargs)))
        self.counter.add(tensors_in(result), device)
        return result
