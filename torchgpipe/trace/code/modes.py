"""Arguments that have one value in training mode, and another value in evaluation mode."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ByMode:
    """A placeholder in recorded arguments for a value that depends on the training mode.

    For example, `dropout(x, training=self.training)` passes `True` in training, and `False` in
    evaluation.

    Attributes:
        training: The value in training mode.
        evaluation: The value in evaluation mode.
    """

    training: Any
    evaluation: Any
