"""Turn off autocast's cache in tasks with compiled layers, so that they are not compiled once more.

What goes wrong without this guard: under autocast, a forward keeps copies of weights in low
precision in a cache, for later layers. A recomputation runs with the cache turned off. Whether the
cache is on is a setting of PyTorch, and if it changes, `torch.compile` compiles a layer anew. So it
would compile each layer once for forwards and once for recomputations.

What it costs: the copies of weights in low precision are made again in each task. Stages without
compiled layers do not have this guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask


class WithoutCastCache(Guard):
    """The guard that keeps `torch.compile` from compiling layers once more under autocast.

    A layer is compiled anew if autocast's cache of converted weights is turned on or off. The guard
    `AmbientModes` turns the cache off in recomputations. So this guard turns it off in forwards.
    """

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Return a context that turns off autocast's cache while a task's forward runs.

        Recomputations run without this cache, too (see the guard `AmbientModes`).
        """
        return without_cast_cache()

    before_single_pass = before_first_pass


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Turn off autocast's cache of converted weights within this context."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
