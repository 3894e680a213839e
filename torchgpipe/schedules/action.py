"""Actions: what a device does for one micro-batch on one stage, and what has to end before that."""

from collections.abc import Container
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "backward_inputs", "backward_weights", "copy"]
"""The kind of a task. A schedule lists no copies: they follow from the actions on two stages."""

# The kinds of actions by their letters in files and pictures.
LETTERS: dict[str, Kind] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
}


class Action(NamedTuple):
    """A piece of a device's work: a forward, a recomputation, a backward, or half of a backward.

    A backward is either one action, or two halves: first the one that makes the gradients of the
    stage's inputs, and later the one that makes the gradients of its weights.
    """

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


def needs(action: Action, among: Container[Action]) -> list[Action]:
    """Return the actions that have to end before an action starts.

    - A forward needs the forward of its micro-batch on the previous stage.
    - A recomputation needs the forward that it repeats. It does not need the gradient.
    - A backward of the weights needs the backward of the inputs on its own stage.
    - Every other backward needs its recomputation, or its forward if nothing is recomputed. It also
      needs the gradient that the backward on the next stage makes: the half for the inputs, if that
      backward is split.

    Args:
        action: The action that is to start.
        among: All actions of the schedule.
    """
    kind, i, stage = action
    forward = Action("forward", i, stage)
    if kind == "forward":
        return [Action("forward", i, stage - 1)] if stage else []
    if kind == "recompute":
        return [forward]
    if kind == "backward_weights":
        return [Action("backward_inputs", i, stage)]
    recomputation = Action("recompute", i, stage)
    needed = [recomputation if recomputation in among else forward]
    following = stage + 1
    if Action("forward", i, following) in among:
        half = Action("backward_inputs", i, following)
        whole = Action("backward", i, following)
        needed.append(half if half in among else whole)
    return needed
