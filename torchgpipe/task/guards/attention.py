"""Attention in evaluation mode computes in a first pass as it does in the recomputation.

What goes wrong without it: an encoder layer in evaluation mode, with a mask. Without gradients,
PyTorch takes a quicker way through it, which gives something else where inputs are masked. The
first pass would take that way, and the recomputation, which has gradients, would not.

The switch is one for the whole process, and is set while any such first pass runs.
"""

from __future__ import annotations

import torch

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.task.guards.seeded import Everywhere

_WITHOUT_FAST_PATH = Everywhere(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)


class SlowAttention(Guard):
    """Keep PyTorch's attention from its way without gradients, in first passes."""

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Return the context of all such passes."""
        return _WITHOUT_FAST_PATH
