"""Skip connections between layers of a sequence, also across partitions.

Layers declare their skips, and the skips of a whole model are checked before it runs.
"""

from torchgpipe.skip.layout import verify_skippables
from torchgpipe.skip.scope import Namespace
from torchgpipe.skip.skippable import pop, skippable, stash

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
