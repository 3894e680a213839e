"""Check that layers do not depend on the changing state of a mode around the pipeline.

A mode is a `TorchFunctionMode` or a `TorchDispatchMode`.

What goes wrong without this guard: the pipeline is called within a mode that counts operators in an
attribute, and scales the output of each tenth operator. Because this mode changes its attributes, a
recomputation does not enter the mode. So the recomputation would compute other values than the
forward.

The guard keeps the outputs of a task's forward, and compares them with the outputs of the
recomputation. A stage has this guard only if there is a mode that could change its attributes.

What it costs: copies of all outputs of each task are kept until the task's recomputation. If a mode
has changed its attributes, each recomputation compares its outputs with these copies.
"""

from __future__ import annotations

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.tensors.microbatch import Flat


class StatefulModes(Guard):
    """The guard that raises an error if a recomputation has other outputs than the task's forward.

    The outputs can differ if the pipeline was called within a `TorchFunctionMode` or a
    `TorchDispatchMode` that changes its own attributes, because recomputations do not enter such a
    mode.
    """

    def __init__(self, index: int, ambient: AmbientModes) -> None:
        self._index = index
        self._ambient = ambient

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Keep copies of the outputs."""
        task.noted[self] = [None if y is None else y.detach().clone() for y in outputs]

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Raise `RuntimeError` if the outputs differ from the outputs of the task's forward.

        The outputs are compared only if an attribute of a mode around the pipeline has changed. (A
        mode is a `TorchFunctionMode` or a `TorchDispatchMode`.)
        """
        if not self._ambient.changed:
            return
        for x, y in zip(task.noted[self], outputs, strict=False):
            if x is None or y is None:
                continue
            equal = (x == y) | (x != x) & (y != y)  # NaN is not equal to NaN
            if not equal.all():
                raise RuntimeError(
                    f"the recomputation of partition {self._index} returns another output than its "
                    f"forward, because the mode {type(self._ambient.changed[0]).__name__} around "
                    "the pipeline changes its own attributes, so that a recomputation cannot run "
                    "in it; use checkpoint='never'"
                )
