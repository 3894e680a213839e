"""Count the bytes of all tensors alive, where no allocator does.

Storages are noticed as operators return them, in whatever thread, and forgotten when they die.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.trace.parts import tensors_in


class LiveBytes:
    """Count the bytes of live tensors, by the device that they belong to, and the most there ever were.

    A storage counts once, whole, from when it is first seen until it dies. It belongs to the device that was
    named for it, or whose task made it; one made outside all tasks, such as an optimizer's state, to the device
    of the first tensor it was made from.
    """

    def __init__(self, devices: int) -> None:
        self.live = [0] * devices
        self.peak = [0] * devices
        self._known: dict[int, tuple[int, int]] = {}  # id of a storage -> its device, its bytes
        self._lock = threading.RLock()  # a storage may die while this very thread notes another
        self.inner = threading.local()  # its `device` is that of the innermost mode that has one

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the device of the first tensor that is known; the first device where none is."""
        known = (self._known.get(id(tensor.untyped_storage())) for tensor in tensors)
        return next((found[0] for found in known if found is not None), 0)

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count the tensors as the device's own, unless they are known; a storage may have grown."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, size = id(storage), storage.nbytes()
            with self._lock:
                owner, before = self._known.get(key, (device, None))
                if before is None:
                    weakref.finalize(storage, self._forget, key).atexit = False
                self._known[key] = (owner, size)
                self.live[owner] += size - (before or 0)
                self.peak[owner] = max(self.peak[owner], self.live[owner])

    def _forget(self, key: int) -> None:
        with self._lock:
            device, size = self._known.pop(key)
            self.live[device] -= size


class LiveBytesMode(TorchDispatchMode):
    """Show a `LiveBytes` what operators of this thread return, as the device's own, or that of what it is made from.

    Where two modes are active, the outer one sees a result first. It takes the device that the inner one has set.
    """

    def __init__(self, counter: LiveBytes, device: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = self.counter.inner
        before = getattr(inner, "device", None)
        device = inner.device = self.device if before is None else before
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            inner.device = before
        if device is None:
            device = self.counter.device_of(tensors_in((args, kwargs)))
        self.counter.add(tensors_in(result), device)
        return result
