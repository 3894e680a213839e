"""Check that layers do not depend on the changing state of a mode around the pipeline.

What goes wrong without it: the pipeline is called within a `TorchDispatchMode` that counts
operators, and scales the output of each tenth operator. A recomputation does not enter a mode that
changes its attributes, so it would compute other values.

So the outputs of tasks' forwards are kept, and compared with the outputs of the recomputations. A
stage only has this guard if there is a mode that could change.
"""

from __future__ import annotations

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.tensors.microbatch import Flat


class StatefulModes(Guard):
    """The guard that compares the outputs of a recomputation with those of the task's forward.

    These outputs can differ if a mode around the pipeline changes its own attributes.
    """

    def __init__(self, index: int, ambient: AmbientModes) -> None:
        self._index = index
        self._ambient = ambient

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Keep copies of the outputs."""
        task.noted[self] = [None if y is None else y.detach().clone() for y in outputs]

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Compare the outputs with the forward's outputs, if the attributes of a mode have changed.

        The modes are each `TorchFunctionMode` and `TorchDispatchMode` around the pipeline. Raise
        `RuntimeError` if an output differs.
        """
        if not self._ambient.changed:
            return
        for x, y in zip(task.noted[self], outputs, strict=False):
            if x is None or y is None:
                continue
            equal = (x == y) | (x != x) & (y != y)  # NaN is not equal to NaN
            if not equal.all():
                raise RuntimeError(
                    f"the output of partition {self._index} depends on the state of "
                    f"{type(self._ambient.changed[0]).__name__} around the pipeline, so its "
                    "recomputation returns another output; use checkpoint='never'"
                )
