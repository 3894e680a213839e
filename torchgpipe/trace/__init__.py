"""Turn any module into a sequence of layers, by the function `sequential`, in four steps.

1. The module runs on fake tensors, for several batch sizes. Each call of a function or of a
   submodule in its forward is recorded.
2. The recordings are merged into one list of calls that is valid for all batch sizes.
3. The list is cut into layers.
4. The layers' outputs and gradients are compared with the module's.
"""

from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.sequential import sequential

__all__ = ["Untraceable", "sequential"]
