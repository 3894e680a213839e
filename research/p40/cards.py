"""Graphics cards with the P40's chip, GP102, on which others measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GTX_1080_TI", "TITAN_X", "Card"]


class Card(NamedTuple):
    """A graphics card, as NVIDIA's data sheet has it."""

    name: str
    clock: float
    """Hertz, with boost, as in the P40's peak."""
    bandwidth: float
    """Bytes per second of its memory."""
    processors: int
    """Of the chip's 30, with 128 cores each."""

    @property
    def peak(self) -> float:
        """Operations per second: each core multiplies and adds at once."""
        return 2 * 128 * self.processors * self.clock


TITAN_X = Card("Titan X", clock=1.531e9, bandwidth=480e9, processors=28)
GTX_1080_TI = Card("GTX 1080 Ti", clock=1.582e9, bandwidth=484e9, processors=28)
