"""Let a task's forward, but not its recomputation, update the running statistics of batch norms.

What goes wrong without it: a checkpointed task has a batch norm. Its recomputation would update the
running statistics a second time.

In training, the output of a batch norm does not depend on its running statistics. So a
recomputation neither updates the statistics nor needs a copy. If a layer reads the statistics in a
recomputation, an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.task.guards.in_place import Change, InPlace
from torchgpipe.tensors._autograd import within_plain_checkpoint
from torchgpipe.tensors.checkpoint import is_recomputing

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_FORWARDS = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


def norms_in_training(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the batch norms in training, whose output does not depend on running statistics."""
    found = set()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its class has no forward that could be looked at
        is_norm = module.training and type(module).forward in _FORWARDS
        if is_norm and module._buffers and module._buffers.keys() <= _STATISTICS:
            found.add(module)
    return found


class Statistics(Guard):
    """The guard of the running statistics of `norms`, the batch norms of a stage."""

    def __init__(self, norms: Iterable[nn.Module]) -> None:
        self._unread = []
        self._untracked = []
        for norm in norms:
            self._unread.append(Change(norm.__dict__, "_buffers", _Unread(norm._buffers)))
            self._untracked.append(Change(norm.__dict__, "track_running_stats", False))

    def before_recomputation(self, task: GuardedTask) -> InPlace:
        """Return a context in which the layers neither update nor read running statistics."""
        return InPlace([*self._unread, *self._untracked])

    def before_backward(self, task: GuardedTask) -> InPlace:
        """Return a context for a task's backward, in which layers cannot read running statistics.

        In backward, `torch.utils.checkpoint` may run the layers again.
        """
        return InPlace(self._unread)


class _Unread(dict[str, Any]):
    """The buffers of a batch norm in training; reading them in a recomputation raises an error.

    This dictionary replaces the module's buffers in a recomputation and in backward. In backward,
    `torch.utils.checkpoint` may run the layer again. If the layer then read its running statistics,
    `torch.utils.checkpoint` would take them for other tensors that it saved in the first run.
    """

    def __getitem__(self, name: str) -> Any:
        self._refuse()
        if name == "running_mean" and within_plain_checkpoint("unpack_hook"):
            raise RuntimeError(
                "torch.utils.checkpoint(use_reentrant=False) around a batch norm in training saves "
                "other tensors in a checkpointed task; let the pipeline alone checkpoint, or use "
                "checkpoint='never' or use_reentrant=True"
            )
        return super().__getitem__(name)

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    def _refuse(self) -> None:
        if is_recomputing():  # another thread may look at the layers meanwhile
            raise RuntimeError(
                "a layer uses the running statistics of a batch norm in training, which have "
                "changed since the first pass of a checkpointed task; use checkpoint='never', or "
                "keep the norm in evaluation mode"
            )
