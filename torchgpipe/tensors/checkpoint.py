"""Checkpointing: which micro-batches are checkpointed, and whether a layer runs for the first or second time."""

import threading
from typing import Literal, get_args

Mode = Literal["always", "except_last", "never"]
MODES: tuple[Mode, ...] = get_args(Mode)


class _Thread(threading.local):
    checkpointing = False
    recomputing = False
    asked = False  # whether a layer has asked if it is recomputed


_thread = _Thread()


def checkpointed(mode: Mode, m: int) -> int:
    """Return how many of `m` micro-batches are checkpointed: the first ones, all, all but the last, or none.

    The last one's recomputation would start as soon as its forward has ended, so `except_last` leaves it out
    (torchgpipe paper, section 3.2.3).
    """
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def is_checkpointing() -> bool:
    """Return whether the running layer is in the first pass of a checkpointed task, which keeps no activations."""
    return _thread.checkpointing


def is_recomputing() -> bool:
    """Return whether the running layer is in the second pass of a checkpointed task, during backward.

    A layer with an effect beside its output should have that effect in one of the two passes only.
    """
    _thread.asked = True
    return _thread.recomputing


def has_asked() -> bool:
    """Return whether the running layers have asked `is_recomputing` in this pass."""
    return _thread.asked


class CheckpointPhase:
    """Mark what this thread runs: a first pass of a checkpointed task, a recomputation; what is not given stays."""

    def __init__(
        self, *, checkpointing: bool | None = None, recomputing: bool | None = None
    ) -> None:
        self._inner = (
            _thread.checkpointing if checkpointing is None else checkpointing,
            _thread.recomputing if recomputing is None else recomputing,
        )

    def __enter__(self) -> None:
        self._outer = _thread.checkpointing, _thread.recomputing
        _thread.checkpointing, _thread.recomputing = self._inner
        _thread.asked = False

    def __exit__(self, *_: object) -> None:
        _thread.checkpointing, _thread.recomputing = self._outer
