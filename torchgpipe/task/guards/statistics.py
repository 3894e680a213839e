"""Let a task's forward, but not its recomputation, update the running statistics of batch norms.

What goes wrong without this guard: a checkpointed task has a batch norm. Its recomputation would
update the running statistics a second time.

In training, the output of a batch norm does not depend on its running statistics. So the guard need
not give the recomputation the old statistics. If a layer reads the running statistics in a
recomputation all the same, an error is raised.

What it costs: when a mini-batch begins, a dictionary is made for each batch norm. Each
recomputation assigns four Python attributes for each batch norm, and each backward assigns two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchgpipe.modules import Swap, Swapped
from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.tensors._autograd import within_plain_checkpoint
from torchgpipe.tensors.checkpoint import is_recomputing


class Statistics(Guard):
    """The guard that keeps recomputations from updating batch norms' running statistics again.

    Without it, the statistics would count each micro-batch of a checkpointed task twice.

    Args:
        norms: The batch norms that are in training mode.
    """

    def __init__(self, norms: Iterable[nn.Module]) -> None:
        self._unread = []
        self._untracked = []
        for norm in norms:
            unread = _Unread(norm._buffers)
            self._unread.append(Swap(norm.__dict__, "_buffers", unread))
            self._untracked.append(Swap(norm.__dict__, "track_running_stats", False))

    def before_recomputation(self, task: GuardedTask) -> Swapped:
        """Return a context for the recomputation, in which batch norms do not update statistics.

        The forward has already updated these statistics. In the context, reading them raises an
        error.
        """
        return Swapped([*self._unread, *self._untracked])

    def before_backward(self, task: GuardedTask) -> Swapped:
        """Return a context for a task's backward, in which reading running statistics is an error.

        In a backward, layers run again if the user's code has wrapped them in
        `torch.utils.checkpoint`, which does not handle running statistics (see `_Unread`).
        """
        return Swapped(self._unread)


class _Unread(dict[str, Any]):
    """A dictionary of a batch norm's buffers, which raises an error if they are read too late.

    This dictionary replaces the `_buffers` of a batch norm in training mode:

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
