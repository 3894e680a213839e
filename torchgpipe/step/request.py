"""The arguments of a training step, except for its input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.caught import shortened

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
    first: bool = False  # whether this is the first step of the pipeline


def check_criterion(given: object, call: str = "step") -> None:
    """Raise `TypeError` if `step` or `loss` is given something else than a criterion."""
    if isinstance(given, type):
        name = given.__name__
        raise TypeError(
            f"the criterion must be a function, but got the class {name}; give {name}()"
        )
    if not callable(given):
        raise TypeError(
            "the criterion must be a function of an output and its target, but got "
            f"{type(given).__name__}; call {call}(criterion, input, target)"
        )


def start_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Let a scaler of gradients create its scale, which each rank needs after the step.

    Raises:
        TypeError: `step` was given something else than a scaler.
    """
    if isinstance(scaler, type) or not callable(getattr(scaler, "scale", None)):
        raise TypeError(
            "scaler must be a torch.amp.GradScaler(), or over ranks a ShardedGradScaler(), but got "
            + shortened(scaler)
        )
    scaler.scale(torch.zeros((), device=device))
