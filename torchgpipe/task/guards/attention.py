"""Make attention in evaluation mode compute the same in a first pass and in its recomputation.

What goes wrong without this guard: a transformer encoder layer in evaluation mode gets a mask. If
gradients are off, PyTorch runs a faster kernel, which returns other values at masked positions. The
first pass runs without gradients, so it would use this kernel. The recomputation runs with
gradients, so it would use another kernel and compute other values.

PyTorch has one switch for the faster kernel, which is valid for the whole process. The guard turns
the switch off while a first pass runs.

What it costs: first passes use the slower kernel.
"""

from __future__ import annotations

import torch

from torchgpipe.setting import ProcessSetting
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask

_WITHOUT_FAST_PATH = ProcessSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)


class SlowAttention(Guard):
    """The guard that makes attention compute the same in a task's forward and recomputation.

    PyTorch's fast path is a kernel that returns other values at masked positions, and that computes
    no gradients. A recomputation needs gradients, so it cannot use this kernel. The guard turns the
    fast path off in the first pass (the forward of a checkpointed task), too.
    """

    def before_first_pass(self, task: GuardedTask) -> Context:
        """Return a context that turns off PyTorch's fast path of attention during a first pass."""
        return _WITHOUT_FAST_PATH
