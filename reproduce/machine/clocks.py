"""Ask nvidia-smi how fast the GPUs are clocked now, and why they are not faster."""

import subprocess

from msgspec import Struct

FIELDS = "index,clocks.sm,clocks.mem,power.draw,temperature.gpu"
# The newer name comes first. Drivers from before 2023 know only the older name.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# The bits of the reasons, as nvml.h names them.
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
SECONDS = 20
"""How long nvidia-smi may take. Where the driver is not loaded all the time, it starts slowly."""


class GpuState(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a GPU did at one time. A field is None if the driver does not tell.

    Attributes:
        index: The number that the driver gives the GPU.
        clock: The clock rate of the multiprocessors, in MHz.
        memory_clock: The clock rate of the memory, in MHz.
        power: The power draw in watts.
        temperature: The temperature in degrees Celsius.
        slowed_by: What kept the clock rate below its maximum. An idle GPU has no such reason.
    """

    index: int
    clock: float | None = None
    memory_clock: float | None = None
    power: float | None = None
    temperature: float | None = None
    slowed_by: list[str] = []


def gpu_states() -> list[GpuState]:
    """Return the state of each GPU of this machine; an empty list if nvidia-smi does not tell."""
    for reasons in REASONS:
        printed = nvidia_smi(f"--query-gpu={FIELDS},{reasons}", "--format=csv,noheader,nounits")
        if printed is not None:
            return [_parse(line) for line in printed.splitlines()]
    return []


def nvidia_smi(*arguments: str) -> str | None:
    """Run nvidia-smi, and return what it prints; None if it is not installed or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _parse(line: str) -> GpuState:
    """Parse a line of nvidia-smi's table. A number that is not known is a word in brackets."""
    index, clock, memory_clock, power, temperature, bits = line.split(",")
    try:
        active = int(bits, 16)
    except ValueError:
        active = 0
    return GpuState(
        index=int(index),
        clock=_number(clock),
        memory_clock=_number(memory_clock),
        power=_number(power),
        temperature=_number(temperature),
        slowed_by=[name for bit, name in SLOWED_BY.items() if active & bit],
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
