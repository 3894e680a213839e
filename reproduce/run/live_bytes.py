"""Count the bytes of all live tensors, on devices whose allocator does not.

A storage is counted when an operator returns it, in any thread, until it is freed.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.trace.parts import tensors_in


class LiveBytes:
    """Count the bytes of live tensors on each (emulated) device, now and at the peak.

    A storage counts once, with all its bytes, from when it is first seen until it is freed. It belongs to the device
    given to `add`, or to the device of the task that made it. Outside of tasks (an optimizer's state), it belongs to
    the device of the first known tensor that it was made from.
    """

    def __init__(self, devices: int) -> None:
        self.live = [0] * devices
        self.peak = [0] * devices
        self._known: dict[int, tuple[int, int]] = {}  # id of a storage -> its device, its bytes
        self._lock = threading.RLock()  # reentrant: `add` may free a storage, which calls `_forget`
        self.inner = threading.local()  # `.device`: that of the innermost active mode that has one

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the device of the first tensor that is known; the first device where none is."""
        known = (self._known.get(id(tensor.untyped_storage())) for tensor in tensors)
        return next((found[0] for found in known if found is not None), 0)

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count tensors on a device, unless their storage is known. Update the size of one that has grown."""
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
    """Add what operators of this thread return to a `LiveBytes`, on `device`; if None, on that of their arguments.

    If two modes are active, the outer one adds a result first, on the device that the inner one has set.
    """

    only_watches = True

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
