"""What a training step is asked for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
"""Returns a loss for an output and its target, or a loss and what is to be kept of it."""


class StepRequest(NamedTuple):
    """What `step` and `evaluate` are given beside the input."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    logs: list[Any]  # filled with what the criterion logs of each micro-batch
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True  # of `step`
