"""Autocast must not keep copies of weights that a first pass has made.

What goes wrong without it: two micro-batches under autocast. The first pass of one runs without a
graph, and autocast keeps its copy of a weight in low precision for the rest of the call. The task
of the other would use that copy, which has no graph either, and the weight would get no gradient.

Where autocast is off, a stage has no such guard.
"""

from __future__ import annotations

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.task.guards.modes import AmbientModes


class UncachedAutocast(Guard):
    """Autocast around the pipeline."""

    def __init__(self, ambient: AmbientModes) -> None:
        self._ambient = ambient

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Enter the same autocast, without copies."""
        return self._ambient.without_cached_casts()
