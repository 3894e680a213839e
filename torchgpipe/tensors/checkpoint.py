"""Checkpointing: which micro-batches are checkpointed, and in which of its passes a layer runs.

A checkpointed task runs twice. The first pass keeps no activations. The second pass, in backward,
recomputes them.
"""

import threading
from typing import Literal, get_args

Mode = Literal["always", "except_last", "never"]
MODES: tuple[Mode, ...] = get_args(Mode)


class _Thread(threading.local):
    checkpointing = False
    recomputing = False
    asked = False  # whether a layer has called `is_recomputing`


_thread = _Thread()


def checkpointed(mode: Mode, m: int) -> int:
    """Return how many of `m` micro-batches are checkpointed, counted from the first micro-batch.

    The mode `except_last` leaves out the last micro-batch, because its recomputation would start as
    soon as its forward has ended (torchgpipe paper, section 3.2.3).
    """
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def is_checkpointing() -> bool:
    """Return whether the running layer is in the first pass of a checkpointed task.

    That pass keeps no activations.
    """
    return _thread.checkpointing


def is_recomputing() -> bool:
    """Return whether the running layer is in the second pass of a checkpointed task.

    That pass runs during backward. A layer with an effect beside its output, such as a counter,
    should have the effect in only one of the two passes.
    """
    _thread.asked = True
    return _thread.recomputing


def has_asked() -> bool:
    """Return whether any of the running layers has called `is_recomputing` in this pass."""
    return _thread.asked


class CheckpointPhase:
    """A context that marks in which pass of a checkpointed task this thread is.

    Args:
        checkpointing: Whether this is the first pass. `None` keeps the current flag.
        recomputing: Whether this is the second pass. `None` keeps the current flag.
    """

    def __init__(
        self, *, checkpointing: bool | None = None, recomputing: bool | None = None
    ) -> None:
        if checkpointing is None:
            checkpointing = _thread.checkpointing
        if recomputing is None:
            recomputing = _thread.recomputing
        self._inner = checkpointing, recomputing

    def __enter__(self) -> None:
        self._outer = _thread.checkpointing, _thread.recomputing
        _thread.checkpointing, _thread.recomputing = self._inner
        _thread.asked = False

    def __exit__(self, *_: object) -> None:
        _thread.checkpointing, _thread.recomputing = self._outer
