"""Skip connections between layers of a sequence, across partitions too."""

from torchgpipe.skip.scope import Namespace
from torchgpipe.skip.skippable import pop, skippable, stash
from torchgpipe.skip.verify import verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
