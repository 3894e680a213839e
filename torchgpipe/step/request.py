"""The arguments of a training step, except for its input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
"""Returns a loss for an output and its target, or a loss and what is to be kept of it."""


class StepRequest(NamedTuple):
    """The arguments of `step` and `evaluate`, except for the input."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    logs: list[Any]  # filled with what the criterion logs of each micro-batch
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True  # `step` runs a backward, and `evaluate` does not

    def check(self) -> None:
        """Raise `TypeError` if the criterion or the weight is not a function."""
        criterion = self.criterion
        if isinstance(criterion, type):
            name = criterion.__name__
            raise TypeError(
                f"the criterion must be a function, but got the class {name}; give {name}()"
            )
        if not callable(criterion):
            raise TypeError(
                "the criterion must be a function of an output and its target, but got "
                f"{type(criterion).__name__}; call step(criterion, input, target)"
            )
        if self.weight is not None and not callable(self.weight):
            raise TypeError(
                "weight must be a function that returns the weight of a micro-batch's loss, given "
                f"its target, but got {self.weight!r}"
            )
