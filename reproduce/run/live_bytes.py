"""Count the bytes of all tensors alive, where no allocator does.

Storages are noticed as operators return them, in whatever thread, and forgotten when they die.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes:
    """Count the bytes of live tensors, by the device that they belong to, and the most there ever were.

    A storage counts once, whole, from when it is first seen until it dies. It belongs to the device that was
    named for it, or whose task made it; one made outside all tasks, such as an optimizer's state, to the device
    of the first tensor it was made from.
    """

    def __init__(self, devices: int) -> None:
        self.live = [0] * devices
        self.peak = [0] * devices
        self.most = 0
        """How many storages were alive at once, at most."""
        self._known: dict[int, tuple[int, int]] = {}  # id of a storage -> its device, its bytes
        self._lock = threading.RLock()  # a storage may die while this very thread notes another

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count the tensors as the device's own."""
        for tensor in tensors:
            self._note(tensor, device)

    @property
    def count(self) -> int:
        """How many storages are alive."""
        return len(self._known)

    def restart(self) -> None:
        """Forget the peaks so far."""
        self.peak, self.most = list(self.live), self.count

    @contextlib.contextmanager
    def watch(self, device: int | None = None) -> Iterator[Watch]:
        """Count what this thread makes meanwhile, as the device's own, or by what it is made from."""
        with Watch(self, device) as watch:
            yield watch

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the device of the first tensor that is known; the first device where none is."""
        for tensor in tensors:
            known = self._known.get(id(tensor.untyped_storage()))
            if known is not None:
                return known[0]
        return 0

    def _note(self, tensor: Tensor, device: int) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        with self._lock:
            owner, before = self._known.get(key, (device, None))
            if size == before:
                return
            if before is None:
                weakref.finalize(storage, self._forget, key).atexit = False
            self._known[key] = (owner, size)
            self.live[owner] += size - (before or 0)
            self.peak[owner] = max(self.peak[owner], self.live[owner])
            self.most = max(self.most, self.count)

    def _forget(self, key: int) -> None:
        with self._lock:
            device, size = self._known.pop(key)
            self.live[device] -= size


class Watch(TorchDispatchMode):
    """Show a `LiveBytes` every tensor that an operator returns, as `device`'s own. Not to be shared by threads."""

    def __init__(self, counter: LiveBytes, device: int | None) -> None:
        TorchDispatchMode.__init__(self)
        self.counter = counter
        self.device = device

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        device = self.device
        if device is None:
            device = self.counter.device_of(_tensors((args, kwargs)))
        self.counter.add(_tensors(result), device)
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in what an operator takes or returns: values in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
