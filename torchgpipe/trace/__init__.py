"""Turn any module into a sequence of layers (`sequential`).

The calls that the module's forward makes are recorded for several batch sizes. They are generalised
to all batch sizes, and cut into layers. Then the layers' outputs are compared with the module's.
"""

from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.sequential import sequential

__all__ = ["Untraceable", "sequential"]
