"""Refuse layers that use a parameter which belongs to layers of another process (rank).

Without this check, a mistake like the following would not be noticed. Suppose that the last layer
of a language model uses the weight of the embedding, which is on another rank. The last layer keeps
the embedding in a list, `self.embedding = [embedding]`. PyTorch does not see modules in a list. So
the pipeline does not know that the last layer needs the weight. The last layer would use a copy of
the weight that is never trained, and the gradient of this copy would be lost.

The check searches the autograd graph of each stage's first task once, in the first mini-batch of a
pipeline over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.tensors.leaves import leaves_of


class OtherRanksParameters(Guard):
    """A guard that raises an error if a stage uses a parameter of another rank's layers.

    Without the error, the stage would use a copy of the parameter that is never trained.

    Args:
        index: The index of the stage, for the error message.
        elsewhere: Maps each parameter of other ranks' layers to its name.
    """

    def __init__(self, index: int, elsewhere: Mapping[Tensor, str]) -> None:
        self._index = index
        self._elsewhere = elsewhere
        self._done = False

    def before_backward(self, task: GuardedTask) -> None:
        """Search the autograd graph of the stage's first task for parameters of other ranks.

        Raises:
            RuntimeError: If the graph uses such a parameter.
        """
        if self._done:
            return
        self._done = True
        roots = [edge.node for edge in task.edges or () if edge is not None]
        for leaf in leaves_of(roots):
            if leaf in self._elsewhere:
                raise RuntimeError(
                    f"a layer of partition {self._index} uses the parameter "
                    f"{self._elsewhere[leaf]!r}, which only layers of another rank have as an "
                    "attribute, so the gradient from this layer would be lost; make it an "
                    "attribute of this layer, too, as in self.weight = embedding.weight"
                )
