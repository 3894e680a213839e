"""What layers compute must not depend on the state of a mode around the pipeline.

What goes wrong without it: a mode of operators, around the call, counts operators and scales each
tenth. A recomputation, which leaves such a mode out, would give something else.

So the outputs of first passes are kept where a mode may have state, and compared. Where none has, a
stage has no such guard.
"""

from __future__ import annotations

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.tensors.microbatch import Flat


class StatefulModes(Guard):
    """Modes around the pipeline, which partition `index` may depend on."""

    def __init__(self, index: int, ambient: AmbientModes) -> None:
        self._index = index
        self._ambient = ambient

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Keep copies of the outputs."""
        task.noted[self] = [None if y is None else y.detach().clone() for y in outputs]

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Raise `RuntimeError` if the outputs are others, and a mode has changed."""
        if not self._ambient.changed:
            return
        for x, y in zip(task.noted[self], outputs, strict=False):
            if x is None or y is None:
                continue
            equal = (x == y) | (x != x) & (y != y)  # NaN is not equal to NaN
            if not equal.all():
                raise RuntimeError(
                    f"what partition {self._index} computes depends on state of "
                    f"{type(self._ambient.changed[0]).__name__} around the pipeline, so its "
                    "recomputation gives something else; use checkpoint='never'"
                )
