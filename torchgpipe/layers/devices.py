"""Choose the devices of a pipeline, and raise an error if the pipeline is moved later."""

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from torchgpipe.caught import how_many, shortened
from torchgpipe.tensors import accelerator

MOVING = (
    "a pipeline keeps each partition on the device that it was made with, and cannot be moved; "
    "name the devices when wrapping the module: GPipe(module, balance, devices=[…]), or device=… "
    "on a rank"
)


M = TypeVar("M", bound="FixedDevices")


_DEVICES = "devices must be a list of devices, one per partition, such as ['cuda:0', 'cuda:1']"


def check_list(devices: object) -> None:
    """Raise `TypeError` if the argument `devices` of a pipeline is one device, and not a list."""
    if isinstance(devices, str | torch.device | int):
        raise TypeError(f"{_DEVICES}, but got {devices!r}")


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (TypeError, RuntimeError):  # the message of PyTorch can have several lines
        raise TypeError(
            f"{shortened(given)} is not a device of PyTorch; give devices such as 'cpu' or 'cuda:0'"
        ) from None


def choose_devices(
    devices: Iterable[int | str | torch.device] | None, n: int
) -> list[torch.device]:
    """Return the first `n` of the given devices.

    If `devices` is `None`, return the first `n` GPUs, or the CPU `n` times if there is no GPU.

    Raises:
        IndexError: If there are fewer than `n` devices.
        TypeError: If `devices` is a single device, or if one of its items is not a device.
    """
    check_list(devices)
    if devices is not None:
        found = [_device(device) for device in devices]
    else:
        found = accelerator.all_devices() or [torch.device("cpu")] * n
    if n and not found:
        raise IndexError("devices is empty; name a device for each partition: devices=['cpu']")
    if len(found) < n:
        count = len(found)
        raise IndexError(
            f"too few devices: {how_many(n, 'partition')}, but {how_many(count, 'device')}; give a "
            f"balance of at most {how_many(count, 'partition')}, or name a device several times in "
            "devices=[…]"
        )
    if devices is not None and len(found) > n:
        warnings.warn(
            f"devices=[…] names {len(found)} devices, of which the pipeline uses the first {n}; "
            "name no more than it uses, or choose a balance and a schedule for all of them",
            stacklevel=3,
        )
    return [accelerator.with_index(device) for device in found][:n]


class FixedDevices(nn.Module):
    """A base class of pipelines, whose partitions cannot be moved to other devices."""

    def cuda(self: M, device: int | str | torch.device | None = None) -> M:
        """Return the pipeline if all of it is on the given CUDA device; else raise `TypeError`.

        A pipeline cannot be moved, because each partition has its own device.
        """
        kind = accelerator.KIND
        return self.to(torch.device(kind, device) if isinstance(device, int) else device or kind)

    def cpu(self: M) -> M:
        """Return the pipeline if all of it is on the CPU; else raise `TypeError`.

        A pipeline cannot be moved, because each partition has its own device.
        """
        return self.to("cpu")

    def to(self: M, *args: Any, **kwargs: Any) -> M:
        """Change the dtype of parameters and buffers; raise `TypeError` if they would move.

        A pipeline cannot be moved, because each partition has its own device. But training scripts
        often call `model.to(device)`. This is allowed if all parameters and buffers are already on
        `device`.
        """
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and not self._is_on(torch.device(device)):
            raise TypeError(MOVING)
        changes: Any = {"dtype": dtype, "non_blocking": non_blocking}
        return super().to(**changes, memory_format=memory_format)

    def _is_on(self, device: torch.device) -> bool:
        if device.type == "cpu":
            device = torch.device("cpu")  # "cpu:0" is the same device
        elif accelerator.default_kind() == device.type:
            device = accelerator.with_index(device)
        return {x.device for x in (*self.parameters(), *self.buffers())} <= {device}
