"""Any module as a sequence of layers: its calls are recorded, made the same for all batch sizes, cut, and checked."""

from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.sequential import sequential

__all__ = ["Untraceable", "sequential"]
