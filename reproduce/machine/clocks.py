"""Ask the driver how fast GPUs are clocked now, and why they are not faster."""

import ctypes
import functools
import operator

from msgspec import Struct

from reproduce.machine.devices import Devices
from reproduce.machine.driver import CLOCK_MEMORY, CLOCK_SM, ask, handle, numbered

# The newer name comes first. Drivers from before 2023 know only the older name.
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# The bits of the reasons, as nvml.h names them.
IDLE = 0x01
SLOWED_BY = {
    0x02: "application clocks",
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
ON_CHIP = 0
"""The number of the sensor of temperature in nvml.h."""


class GpuState(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The clock rates, power and temperature of a GPU at one moment.

    A field is None if the driver does not tell its value.

    Attributes:
        index: The number that the driver gives the GPU.
        clock: The clock rate of the multiprocessors, in MHz.
        memory_clock: The clock rate of the memory, in MHz.
        power: The power draw in watts.
        temperature: The temperature in degrees Celsius.
        idle: Whether the clock rate is low because the GPU has nothing to do.
        slowed_by: The other reasons why the clock rate was below its maximum, such as a power cap.
    """

    index: int
    clock: float | None = None
    memory_clock: float | None = None
    power: float | None = None
    temperature: float | None = None
    idle: bool | None = None
    slowed_by: list[str] | None = None


def gpu_states() -> list[GpuState]:
    """Return the clock rates, power and temperature of each GPU of this machine.

    If there is no GPU driver, the list is empty.
    """
    states = []
    for index in range(ask("nvmlDeviceGetCount_v2") or 0):
        known = numbered(index)
        states.append(GpuState(index) if known is None else _state(index, known))
    return states


def _state(index: int, known: ctypes.c_void_p) -> GpuState:
    milliwatts = ask("nvmlDeviceGetPowerUsage", known)
    reasons = _reasons(known)
    slowed_by = None
    if reasons is not None:
        slowed_by = [name for bit, name in SLOWED_BY.items() if reasons & bit]
    return GpuState(
        index=index,
        clock=_clock(known, CLOCK_SM),
        memory_clock=_clock(known, CLOCK_MEMORY),
        power=None if milliwatts is None else milliwatts / 1000,
        temperature=_number(ask("nvmlDeviceGetTemperature", known, ON_CHIP)),
        idle=None if reasons is None else bool(reasons & IDLE),
        slowed_by=slowed_by,
    )


def clocks(devices: Devices) -> dict[str, float]:
    """Return the current clock rates of CUDA devices, and what lowers them, in a dictionary.

    - "clock": the clock rate of the multiprocessors, in MHz, of the slowest device
    - "memory_clock": the clock rate of the memory, in MHz, of the slowest device
    - "slowed": the reasons why clock rates of any device are below their maximum. The value is a
      sum of NVML's numbers for the reasons, such as 4 for the power limit and 32 for the
      temperature.

    A value that the driver does not tell is left out. For devices other than CUDA devices, the
    result is empty.
    """
    if devices.kind != "cuda":
        return {}
    rates: dict[str, list[float]] = {"clock": [], "memory_clock": []}
    reasons: list[int] = []
    for device in devices.first(devices.count):
        known = handle(device)
        if known is None:
            return {}
        for name, kind in (("clock", CLOCK_SM), ("memory_clock", CLOCK_MEMORY)):
            rate = _clock(known, kind)
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


def _clock(known: ctypes.c_void_p, kind: int) -> float | None:
    return _number(ask("nvmlDeviceGetClockInfo", known, kind))


def _reasons(known: ctypes.c_void_p) -> int | None:
    """Return why a GPU's clock rates are below their maximum: a number with a bit per reason."""
    for name in REASONS:
        bits: int | None = ask(name, known, kind=ctypes.c_ulonglong)
        if bits is not None:
            return bits
    return None


def _number(told: int | None) -> float | None:
    return None if told is None else float(told)
