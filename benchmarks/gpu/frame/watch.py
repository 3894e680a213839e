"""Watch the machine's GPUs while a measurement runs."""

from msgspec import Struct

from reproduce.machine.clocks import GpuState, gpu_states

Range = tuple[float, float]
"""The lowest and the highest of some numbers."""


class Watched(Struct, frozen=True, omit_defaults=True):
    """A summary of what a GPU did while a measurement ran.

    A field is `None` if the GPU's driver does not know its value.

    Attributes:
        index: The number that the driver gives the GPU.
        looks: How many times the driver was asked about the GPU.
        busy: How many times the GPU was not idle when the driver was asked. The following fields
            are about these times only.
        clock: The lowest and the highest clock rate of the multiprocessors, in MHz.
        power: The highest power draw in watts.
        temperature: The highest temperature in degrees Celsius.
        slowed_by: The reasons that kept the clock rate below its maximum, each with the number of
            times when the driver gave this reason.
    """

    index: int
    looks: int
    busy: int
    clock: Range | None = None
    power: float | None = None
    temperature: float | None = None
    slowed_by: dict[str, int] | None = None


class Watch:
    """A collection of the states that the GPUs had each time when `look` was called."""

    def __init__(self) -> None:
        self._states: dict[int, list[GpuState]] = {}

    def look(self) -> None:
        """Ask the driver for the states of all GPUs, and keep them; do nothing without a driver."""
        for state in gpu_states():
            self._states.setdefault(state.index, []).append(state)

    def found(self) -> list[Watched]:
        """Return what each GPU did."""
        return [_summed_up(states) for states in self._states.values()]


def _summed_up(states: list[GpuState]) -> Watched:
    busy = [state for state in states if not state.idle]
    clocks = [state.clock for state in busy if state.clock is not None]
    powers = [state.power for state in busy if state.power is not None]
    temperatures = [state.temperature for state in busy if state.temperature is not None]
    slowed_by: dict[str, int] | None = None
    for state in busy:
        if state.slowed_by is not None:
            slowed_by = slowed_by or {}
            for reason in state.slowed_by:
                slowed_by[reason] = slowed_by.get(reason, 0) + 1
    return Watched(
        index=states[0].index,
        looks=len(states),
        busy=len(busy),
        clock=(min(clocks), max(clocks)) if clocks else None,
        power=max(powers, default=None),
        temperature=max(temperatures, default=None),
        slowed_by=slowed_by,
    )
