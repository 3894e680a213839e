"""Count the bytes of all tensors that are in memory, for devices whose allocator counts no bytes.

The storage of a tensor is counted from the time when an operator returns the tensor until the
storage is freed. The operators of all threads are observed.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.tensors._autograd import pop_mode, push_mode
from torchgpipe.trace.parts import tensors_in


class LiveBytes:
    """Counts the bytes of tensors that are in memory on each device, now and at the peak.

    The devices may be emulated on a single device. A tensor's storage counts once, with all its
    bytes, from the time when it is first seen until it is freed. It counts on one device:

    - A tensor that was passed to `add` counts on the device that was passed with it.
    - A tensor that a task of the pipeline made counts on the device of the task.
    - A tensor that another operator made, such as an optimizer's, counts on the device of the
      operator's first argument whose storage is counted already.

    Attributes:
        live: The bytes that are in memory now, on each device.
        peak: The most bytes that were in memory at any time, on each device.
        inner: In each thread, `inner.device` is the device of the innermost active `LiveBytesMode`.
            The results of the operator that runs now count on this device.
    """

    def __init__(self, devices: int) -> None:
        self.live = [0] * devices
        self.peak = [0] * devices
        # Maps the id of each storage to its device and its bytes.
        self._known: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()  # reentrant: `add` may free a storage, which calls `_forget`
        self.inner = threading.local()

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the number of the device on which the first of some tensors counts.

        Tensors that are not counted are skipped. If all are skipped, return 0, the first device.
        """
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            found = self._known.get(key)
            if found is not None:
                device, _ = found
                return device
        return 0

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count the storages of tensors on a device from now on, unless they are counted already.

        If a storage that is counted already has grown, update its size.
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
    """A dispatch mode that adds the results of this thread's operators to a `LiveBytes` counter.

    A result counts on `device` or, if `device` is None, on the device of the operator's arguments.
    If one `LiveBytesMode` is active within another, only the device of the inner mode is used.
    """

    only_watches = True

    def __init__(self, counter: LiveBytes, device: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter
        self.device = device

    # These two methods change the mode of this thread only. The methods of the base class also set
    # variables that all threads share. If worker threads enter and leave modes at the same time,
    # these variables keep wrong values. Then `torch.compile` compiles the same layers repeatedly.
    def __enter__(self) -> "LiveBytesMode":
        push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        pop_mode()

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
