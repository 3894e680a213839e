"""Ask NVML, the library of NVIDIA's driver, about CUDA devices."""

import functools
import operator
from typing import TYPE_CHECKING, Any

from reproduce.machine.devices import Devices

if TYPE_CHECKING:
    import torch

CLOCK_SM, CLOCK_MEMORY = 1, 2  # the constants for these two types of clock in nvml.h


def ask(function: str, *arguments: object) -> Any:
    """Call a function of NVML and return its result.

    If the call fails, or if the driver or its Python bindings are missing, return None.
    """
    try:
        import pynvml

        pynvml.nvmlInit()  # cheap to repeat: only the first call initializes
        return getattr(pynvml, function)(*arguments)
    except Exception:
        return None


def handle(device: "torch.device | int") -> Any:
    """Return NVML's object for a CUDA device of this process, or None.

    The driver can number the devices differently from CUDA, so the device is looked up by its UUID.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    return ask("nvmlDeviceGetHandleByUUID", f"GPU-{properties.uuid}")


def clocks(devices: Devices) -> dict[str, float]:
    """Return the clock rates of CUDA devices now, and what lowers them.

    - "clock": the clock rate of the multiprocessors, in MHz, of the slowest device
    - "memory_clock": the clock rate of the memory, in MHz, of the slowest device
    - "slowed": the reasons why a clock rate is below its highest, of all devices together; a number
      with NVML's bits, such as 4 for the power limit and 32 for the temperature

    What the driver does not tell is left out. For other devices, the result is empty.
    """
    if devices.kind != "cuda":
        return {}
    rates: dict[str, list[int]] = {"clock": [], "memory_clock": []}
    reasons: list[int] = []
    for device in devices.first(devices.count):
        known = handle(device)
        if known is None:
            return {}
        for name, kind in (("clock", CLOCK_SM), ("memory_clock", CLOCK_MEMORY)):
            rate = ask("nvmlDeviceGetClockInfo", known, kind)
            if rate is not None:
                rates[name].append(rate)
        slowed = _reasons(known)
        if slowed is not None:
            reasons.append(slowed)
    told: dict[str, float] = {}
    for name, found in rates.items():
        if len(found) == devices.count:
            told[name] = min(found)
    if len(reasons) == devices.count:
        told["slowed"] = functools.reduce(operator.or_, reasons)
    return told


def _reasons(known: Any) -> Any:
    """Return the bits of the reasons why a device's clock rates are below their highest."""
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", known)
    if reasons is None:  # older bindings have only the older name
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", known)
    return reasons
