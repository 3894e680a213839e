"""Refuse layers that use a parameter of another process's layers.

What goes wrong without this guard: over ranks (processes), the head of a language model keeps the
embedding in a list, `self.embedding = [embedding]`, to use its weight. PyTorch does not see modules
in a list. So the pipeline does not know that the rank of the head needs the weight, too. The head
would use a copy that is never trained, and the copy's gradient would be lost.

What it costs: in the first mini-batch of a pipeline over ranks, the graph of the first task of each
stage is searched once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.tensors.leaves import leaves_of


class OtherRanksParameters(Guard):
    """The guard that refuses parameters of other ranks' layers.

    Args:
        index: The index of the stage.
        elsewhere: The names of the parameters of other ranks' layers.
    """

    def __init__(self, index: int, elsewhere: Mapping[Tensor, str]) -> None:
        self._index = index
        self._elsewhere = elsewhere
        self._done = False

    def before_backward(self, task: GuardedTask) -> None:
        """Search the graph of the stage's first task.

        Raises:
            RuntimeError: If the graph ends in a parameter of another rank.
        """
        if self._done:
            return
        self._done = True
        roots = [edge.node for edge in task.edges or () if edge is not None]
        for leaf in leaves_of(roots):
            if leaf in self._elsewhere:
                raise RuntimeError(
                    f"a layer of partition {self._index} uses {self._elsewhere[leaf]!r}, a "
                    "parameter of another rank's layers, without having it as a parameter of its "
                    "own; assign it to the layer, such as self.weight = embedding.weight, so that "
                    "the ranks add up its gradients"
                )
