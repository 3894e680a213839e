"""All functions of this library for GPUs: streams, events, memory, and the current device.

Most of them use PyTorch's general interface for accelerators: `torch.accelerator`, `torch.Stream`
and `torch.Event`. Some use functions of `torch.cuda`. All were tried with CUDA only (`KIND`).
Outside of this module, only torchgpipe/distributed/channels/nccl.py depends on CUDA.

Devices of other types, such as the CPU, count as devices without streams: an operator on them has
ended when its call returns.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch

from torchgpipe.tensors.observe import NOTHING

KIND = "cuda"
"""The type of the devices that have streams. PyTorch calls AMD's GPUs "cuda", too."""

WITH_AUTOCAST = frozenset({"cpu", KIND, "xpu"})
"""The types of devices whose autocast a pipeline hands on to its threads and recomputations."""

RANDOM: ModuleType = torch.cuda
"""The module with the functions that set and read the random states of GPUs."""

KERNELS: Any = torch.backends.cuda
"""PyTorch's settings that choose kernels: for matrix products, and for attention."""


def has_streams(device: torch.device) -> bool:
    """Return whether a device is a GPU, whose operators are put into streams and run later."""
    return device.type == KIND


def default_kind() -> str:
    """Return the type of devices to use by default: "cuda" if there are GPUs, or else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return KIND if found is not None and found.type == KIND else "cpu"


def all_devices() -> list[torch.device]:
    """Return all GPUs of this machine that this process may use."""
    if default_kind() != KIND:
        return []
    return [torch.device(KIND, index) for index in range(torch.accelerator.device_count())]


def with_index(device: torch.device) -> torch.device:
    """Return the device; if it is a GPU without an index, add the index of the current GPU."""
    # "cuda" and "cuda:0" are one device, and have to compare equal.
    if device.type != KIND or device.index is not None:
        return device
    return torch.device(KIND, torch.accelerator.current_device_index())


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; do nothing for other devices.

    A new thread that does not call this function would also create a CUDA context on GPU 0, which
    takes memory of this GPU.
    """
    if has_streams(device):
        torch.accelerator.set_device_index(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes a GPU the current device, and does nothing for the CPU."""
    return torch.accelerator.device_index(device.index) if has_streams(device) else NOTHING


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until each GPU in `devices` has done all its work."""
    for device in devices:
        if has_streams(device):
            torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of a device, or `None` if the device has no streams."""
    return torch.Stream(device) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a device, or `None` if the device has no streams."""
    return torch.accelerator.current_stream(device) if device.type == KIND else None


def using(*streams: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context that makes each of these streams the current stream of its device.

    Args:
        *streams: The streams. `None`, for a device without streams, is ignored.
    """
    given = [stream for stream in streams if stream is not None]
    return _using(given) if given else NOTHING


@contextmanager
def _using(streams: list[torch.Stream]) -> Iterator[None]:
    # `with stream:` cannot be used here. It stores the previous stream in the `torch.Stream` object
    # itself, but several threads can use the same copy stream at the same time.
    with torch.accelerator.device_index(streams[0].device.index):
        before = [torch.accelerator.current_stream(stream.device) for stream in streams]
        for stream in streams:
            torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            for stream in reversed(before):
                torch.accelerator.set_stream(stream)


def time_now(device: torch.device) -> torch.Event | None:
    """Record an event, with its time, on a device's current stream; return the event.

    The result is `None` for a device without streams.
    """
    if not has_streams(device):
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def sleep_until_now(device: torch.device) -> torch.Event:
    """Record an event on a GPU's current stream, and return the event.

    A thread that waits for this event sleeps, so that other threads can use its CPU core. (The
    function uses `torch.cuda.Event`, because `torch.Event` ignores `blocking` in PyTorch 2.11.)
    """
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def properties(device: torch.device) -> Any:
    """Return the properties of a GPU, such as `name`, `total_memory` (in bytes) and `uuid`."""
    return torch.get_device_module(device).get_device_properties(device)


def allocated(device: torch.device) -> int:
    """Return how many bytes all tensors on a GPU take at present; 0 for other devices."""
    return torch.accelerator.memory_allocated(device) if has_streams(device) else 0


def with_generators(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the GPUs in `devices`, each only once. Each GPU has its own random generator."""
    return [device for device in {*devices} if has_streams(device)]
