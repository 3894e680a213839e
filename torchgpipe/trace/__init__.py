"""Any module as a sequence of layers.

The module's calls are recorded for several batch sizes, generalised to all batch sizes, and cut
into layers. Then the layers are compared with the module.
"""

from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.sequential import sequential

__all__ = ["Untraceable", "sequential"]
