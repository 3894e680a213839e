"""Measure a training step's peak memory on each device.

On CUDA PyTorch's caching allocator counts: bytes allocated to tensors, and bytes reserved from the device. On a
CPU nothing counts, so the bytes of all tensors alive are counted here: storages are noticed as operators
return them, in whatever thread, and forgotten when they die.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reproduce.devices import Devices
from reproduce.training import Training

__all__ = ["LiveBytes", "Peak", "measure_peak"]


class Peak(NamedTuple):
    """Hold the peak bytes of each device: of tensors, and on CUDA also as reserved by the allocator."""

    allocated: list[int]
    reserved: list[int] | None


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

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        """Count the tensors as the device's own."""
        for tensor in tensors:
            self._note(tensor, device)

    @contextlib.contextmanager
    def watch(self, device: int | None = None) -> Iterator[None]:
        """Count what this thread makes meanwhile, as the device's own, or by what it is made from."""
        with _Watch(self, device):
            yield

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

    def _forget(self, key: int) -> None:
        with self._lock:
            device, size = self._known.pop(key)
            self.live[device] -= size


class _Watch(TorchDispatchMode):
    """Show a `LiveBytes` every tensor that an operator returns. Not to be shared by threads."""

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


def measure_peak(
    training: Training, devices: Devices, *, steps: int, before: Callable[[int], None] = lambda step: None
) -> Peak:
    """Run whole steps and return the peak memory of each of the training's devices.

    Two steps at least are needed to see everything: an optimizer makes its state at the end of the first.
    Nothing else should be alive on the devices. `before` is told the number of each step.
    """
    if devices.kind == "cuda":
        return _measure_cuda(training, devices, steps, before)
    return _measure_live(training, steps, before)


def _measure_cuda(training: Training, devices: Devices, steps: int, before: Callable[[int], None]) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    for device in training.devices:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        before(step)
        training.step()
    devices.synchronize()
    return Peak(
        allocated=[torch.cuda.max_memory_allocated(device) for device in training.devices],
        reserved=[torch.cuda.max_memory_reserved(device) for device in training.devices],
    )


def _measure_live(training: Training, steps: int, before: Callable[[int], None]) -> Peak:
    counter = LiveBytes(len(training.devices))
    for device, partition in enumerate(training.partitions):
        counter.add(_state(partition), device)
    counter.add([training.input], 0)
    counter.add([training.target], len(training.devices) - 1)

    pipelined = training.row.partitions is not None
    watch = training.observed(lambda task: counter.watch(task.partition)) if pipelined else contextlib.nullcontext()
    with watch, counter.watch():
        for step in range(steps):
            before(step)
            training.step()
    return Peak(allocated=counter.peak, reserved=None)


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
