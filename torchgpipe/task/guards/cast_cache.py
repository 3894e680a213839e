"""Let tasks with compiled layers see one state of autocast's cache.

What goes wrong without this guard: under autocast, a forward keeps copies of weights in low
precision for later layers, and a recomputation keeps none. A setting of autocast says whether it
keeps copies. If this setting changes, `torch.compile` compiles a layer anew. So it would compile
each layer twice: for forwards and for recomputations.

What it costs: the copies of weights are made again in each task. Layers that are not compiled do
not have this guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask


class WithoutCastCache(Guard):
    """A guard for compiled layers: under autocast, no task keeps copies of weights."""

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Return a context in which autocast keeps no copies."""
        return _without_cast_cache()

    before_single_pass = before_first_pass


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
