"""Re-export `Saves`, which saves and loads the state of a training run."""

from torchgpipe.state.saves import Saves

__all__ = ["Saves"]
