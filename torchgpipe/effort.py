"""Effort: about how long a task takes, counted from its operators.

Whether partitions gain from threads of their own is decided by counting, not by timing, so that the same program on
the same inputs takes the same engine every time, and gets the same bits. A count knows nothing of what layers do
outside PyTorch's operators; who uses it has to look at the clock for that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Effort"]

# Of one core of an ordinary machine, as orders of magnitude: what is decided by them is a factor of ten apart.
SECONDS_PER_OPERATOR = 5e-6
ELEMENTS_PER_SECOND = 4e9
FLOPS_PER_SECOND = 5e10


class Effort:
    """Add up what operators cost: a fixed time for each, and time in proportion to the sizes of its tensors."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        self._flops = flop_registry
        self.fixed = 0.0
        """Seconds for launching operators, whatever the size of the micro-batch."""
        self.proportional = 0.0
        """Seconds that grow with the micro-batch."""

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one operator, as a dispatch mode sees it."""
        self.fixed += SECONDS_PER_OPERATOR
        if func.is_view:
            return  # moves no data
        elements = _elements((args, tuple(kwargs.values()), out))
        flops = self._flops.get(func.overloadpacket)
        self.proportional += elements / ELEMENTS_PER_SECOND
        if flops is not None:
            self.proportional += flops(*args, **kwargs, out_val=out) / FLOPS_PER_SECOND

    def seconds(self, growth: float) -> float:
        """Estimate the task's time for micro-batches `growth` times as large as the one that was counted."""
        return self.fixed + self.proportional * growth


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, (tuple, list)) else 0
