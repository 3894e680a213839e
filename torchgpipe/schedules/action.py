"""Actions: what a device does for one micro-batch on one stage, and what has to be done before."""

from collections.abc import Container
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "backward_inputs", "backward_weights", "copy"]
"""The kind of a task. Schedules do not list copies, because copies follow from the actions."""

# Maps the letter that stands for a kind in files and pictures to the kind.
LETTERS: dict[str, Kind] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
}


class Action(NamedTuple):
    """One thing that a device does: a forward, a recomputation, a backward or half a backward.

    A backward is either one action or two halves. The first half computes the gradients of the
    stage's inputs. The second half computes the gradients of the stage's weights, and runs later.
    """

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """Return the action's description, which error messages use."""
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


def needs(action: Action, among: Container[Action]) -> list[Action]:
    """Return the actions that have to end before an action starts.

    - A forward needs the forward of the same micro-batch on the previous stage.
    - A recomputation needs the forward that it repeats, but not the gradient for its backward.
    - A backward of the weights needs the backward of the inputs on the same stage.
    - Every other backward needs the recomputation of its activations, or the forward if nothing is
      recomputed. It also needs the backward on the next stage, which computes its gradient. If that
      next backward is split into halves, only the half for the inputs is needed.

    Args:
        action: The action.
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
