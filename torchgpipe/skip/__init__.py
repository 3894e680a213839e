"""Skip connections between layers of an `nn.Sequential`, also across partitions.

Each layer class declares its skips. The skips of a model are checked before the model runs.
"""

from torchgpipe.skip.layout import verify_skippables
from torchgpipe.skip.scope import Namespace
from torchgpipe.skip.skippable import pop, skippable, stash

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
