"""Saved states of a training."""

from torchgpipe.state.saves import Saves

__all__ = ["Saves"]
