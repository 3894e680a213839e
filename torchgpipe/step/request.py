"""What a training step is asked for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Criterion = Callable[[Any, Any], Tensor]


class StepRequest(NamedTuple):
    """What `step` and `evaluate` are given beside the input."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True  # of `step`
