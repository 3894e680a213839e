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
