"""Let a task's forward, but not its recomputation, update the running statistics of batch norms.

What goes wrong without this guard: a checkpointed task has a batch norm. Its recomputation would
update the running statistics a second time.

In training, the output of a batch norm does not depend on its running statistics. So the guard
keeps no copies of them for the recomputation. If a layer reads the running statistics in a
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
    """Return the batch norms in training mode: their output does not use running statistics."""
    found = set()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its class has no forward that could be looked at
        is_norm = module.training and type(module).forward in _FORWARDS
        if is_norm and module._buffers and module._buffers.keys() <= _STATISTICS:
            found.add(module)
    return found


class Statistics(Guard):
    """A guard: a recomputation does not update the running statistics of batch norms again.

    Args:
        norms: The batch norms that are in training mode.
    """

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

        Layers can run in a backward if they are within `torch.utils.checkpoint`.
        """
        return InPlace(self._unread)


class _Unread(dict[str, Any]):
    """A batch norm's buffers. If a layer reads them at the wrong time, an error is raised.

    This dictionary replaces the buffers of a batch norm in training mode:

    - In a recomputation, reading any buffer raises an error, because the running statistics have
      changed since the forward.
    - In backward, `torch.utils.checkpoint` may run the layer again. If the layer then reads its
      running statistics, an error is raised, because `torch.utils.checkpoint` would mistake them
      for other tensors that it saved in the first run.
    """

    def __getitem__(self, name: str) -> Any:
        self._refuse()
        if name == "running_mean" and within_plain_checkpoint("unpack_hook"):
            raise RuntimeError(
                "torch.utils.checkpoint(use_reentrant=False) around a batch norm in training does "
                "not work in a task that the pipeline checkpoints; remove it, or use "
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
