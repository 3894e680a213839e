"""Checkpointing: which micro-batches are checkpointed, and whether a layer runs for the first or second time."""

from __future__ import annotations

import threading
from typing import Literal, get_args

__all__ = ["Mode", "checkpointed", "checkpointing", "is_checkpointing", "is_recomputing", "recomputing"]

Mode = Literal["always", "except_last", "never"]
MODES: tuple[Mode, ...] = get_args(Mode)


class _Pass(threading.local):
    checkpointing = False
    recomputing = False


_pass = _Pass()


def checkpointed(mode: Mode, m: int) -> int:
    """Return how many of `m` micro-batches are checkpointed: the first ones, all, all but the last, or none.

    The last micro-batch's recomputation would start as soon as its forward has ended, so `except_last` leaves it
    out: it costs no memory at the peak and saves time (torchgpipe paper, section 3.2.3).
    """
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def is_checkpointing() -> bool:
    """Return whether the running layer is in the first pass of a checkpointed task, which keeps no activations."""
    return _pass.checkpointing


def is_recomputing() -> bool:
    """Return whether the running layer is in the second pass of a checkpointed task, during backward.

    A layer with an effect beside its output should have that effect in one of the two passes only.
    """
    return _pass.recomputing


class checkpointing:
    """Mark this thread as running the first pass of a checkpointed task."""

    def __enter__(self) -> None:
        self._outer, _pass.checkpointing = _pass.checkpointing, True

    def __exit__(self, *_: object) -> None:
        _pass.checkpointing = self._outer


class recomputing:
    """Mark this thread as running the second pass of a checkpointed task."""

    def __enter__(self) -> None:
        self._outer, _pass.recomputing = _pass.recomputing, True

    def __exit__(self, *_: object) -> None:
        _pass.recomputing = self._outer
