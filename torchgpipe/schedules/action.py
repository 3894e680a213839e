"""Actions: what a device does for one micro-batch on one stage, and the one rule of what has to be over before."""

from collections.abc import Container
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "backward_inputs", "backward_weights", "copy"]
"""What devices are seen to do. Copies follow from the actions on both sides, so that none is an action itself."""

# The kinds of actions by their letters in files and pictures.
LETTERS: dict[str, Kind] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
}


class Action(NamedTuple):
    """A piece of a device's work. A backward is whole, or one of the inputs and, later, one of the weights."""

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


def needs(action: Action, among: Container[Action]) -> list[Action]:
    """Return what has to be over before an action starts, `among` all actions of the schedule.

    A forward needs the forward of the stage before. A recomputation needs its own forward, and no gradient. A
    backward needs its recomputation, or its forward where there is none, and the gradient, which is there when the
    stage after has done its backward, or the half of it for the inputs.
    """
    kind, i, s = action
    if kind == "forward":
        return [Action("forward", i, s - 1)] if s else []
    if kind == "recompute":
        return [Action("forward", i, s)]
    if kind == "backward_weights":
        return [Action("backward_inputs", i, s)]
    again, half = Action("recompute", i, s), Action("backward_inputs", i, s + 1)
    needed = [again if again in among else Action("forward", i, s)]
    if Action("forward", i, s + 1) in among:
        needed.append(half if half in among else Action("backward", i, s + 1))
    return needed
