"""Any module as a sequence of layers.

| module | what it is |
| --- | --- |
| `record`, `recorder`, `watch`, `calls` | what a module calls, recorded on fake tensors |
| `generalise` | one list of calls for all batch sizes |
| `cut` | where layers begin, and the way of each tensor |
| `layer` | a layer that makes some of the calls, and the sequence of them |
| `signature`, `parts` | what the module takes and returns, around the tensors |
| `sequential`, `check`, `refuse` | `sequential` itself, what is checked, and how it is refused |
| `pipeline` | `sequential`, then a plan, then `GPipe` |
"""

from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.sequential import sequential

__all__ = ["Untraceable", "sequential"]
