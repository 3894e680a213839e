"""The cases of `benchmarks.faults`: which fault befalls which rank in which phase, and which cases cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

RANKS = 4
ENOUGH = 100_000  # mini-batches; so many are never reached
FAULTS = ("killed", "stopped", "raising", "out of memory", "hang", "link cut")
PHASES = (
    "loading data", "first mini-batch", "forward", "recomputation", "backward", "loss", "optimizer", "saving",
    "evaluation",
)  # fmt: skip
SLOW = {
    "a pause": ("loading data", "optimizer", "saving"),
    "a long computation": ("forward", "backward"),
    "another process that computes": ("forward",),
    "torch.compile": ("first mini-batch",),
    "all ranks stopped, and continued": ("forward", "backward"),
}
"""What takes twice the silence, and where: nobody may be convicted for it."""

_OWN_CODE = ("raising", "out of memory", "hang")  # happen in a function that the rank runs, not to its process
_PAUSE = "it is a pause of the program's own, which is nobody's failure (below)"
_LAST = "on ranks 0 to 2: the last rank alone computes the loss"


class Cell(NamedTuple):
    """A case: a fault, or what is only slow, the phase that it comes in, and the rank."""

    fault: str
    phase: str
    victim: int

    @property
    def slow(self) -> bool:
        """Whether nobody may be convicted."""
        return self.fault in SLOW

    @property
    def key(self) -> tuple[str, str]:
        """Give its place in a record: the result's experiment, and its row."""
        return f"{self.fault}: {self.phase}", f"rank {self.victim}"

    @property
    def name(self) -> str:
        """Give its name on a command line."""
        return ": ".join(self.key)

    def why_not(self) -> str | None:
        """Return why there can be no such case, or `None`."""
        if self.fault == "hang" and self.phase in SLOW["a pause"]:
            return _PAUSE
        if self.fault in _OWN_CODE and self.phase == "loss" and self.victim < RANKS - 1:
            return _LAST
        return None


class Case(NamedTuple):
    """All that a rank has to know of a case.

    Attributes:
        silence: seconds that a rank may give no sign of life.
        folder: where ranks meet, print, and mark what has happened.
        steps: mini-batches after which they end, if nothing has gone wrong.
        networks: those that ranks are in, if each has one of its own.
    """

    fault: str
    phase: str
    victim: int
    silence: float
    folder: str
    steps: int = ENOUGH
    networks: str = ""


def all_cells() -> Iterator[Cell]:
    """Yield all cases that can be."""
    matrix = (Cell(fault, phase, victim) for fault in FAULTS for phase in PHASES for victim in range(RANKS))
    yield from (cell for cell in matrix if cell.why_not() is None)
    for fault, phases in SLOW.items():
        victims = range(RANKS) if fault == "a pause" else (1,)
        yield from (Cell(fault, phase, victim) for phase in phases for victim in victims)
