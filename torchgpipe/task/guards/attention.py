"""Make attention in evaluation mode compute the same in a first pass and in its recomputation.

What goes wrong without it: an encoder layer in evaluation mode has a mask. If gradients are off,
PyTorch runs a faster kernel, which returns other values at masked positions. The first pass runs
without gradients, and uses this kernel. The recomputation runs with gradients, so it does not use
this kernel.

PyTorch has one switch for this kernel in the whole process. The switch is off while a first pass
without gradients runs.
"""

from __future__ import annotations

import torch

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.task.guards.seeded import Everywhere

_WITHOUT_FAST_PATH = Everywhere(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)


class SlowAttention(Guard):
    """A guard that switches off PyTorch's fast path of attention in forwards without gradients."""

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Return the context that switches the fast path off."""
        return _WITHOUT_FAST_PATH
