"""Checkpointing: find out which pass of a checkpointed task is running.

`torchgpipe.schedules.schedule.checkpointed` says which micro-batches are checkpointed.

A checkpointed task runs twice. The first pass keeps no activations. The second pass, in backward,
recomputes the activations.
"""

import threading

from torchgpipe.schedules.schedule import MODES as MODES
from torchgpipe.schedules.schedule import Mode as Mode
from torchgpipe.schedules.schedule import checkpointed as checkpointed


class _Thread(threading.local):
    checkpointing = False
    recomputing = False
    asked = False  # whether a layer has called `is_recomputing`


_thread = _Thread()


def is_checkpointing() -> bool:
    """Return whether the running layer is in the first pass of a checkpointed task.

    A checkpointed task runs its layers twice. The first pass, in forward, keeps no activations.
    """
    return _thread.checkpointing


def is_recomputing() -> bool:
    """Return whether the running layer is in the second pass of a checkpointed task.

    A checkpointed task runs its layers twice: in forward, and again in backward to recompute the
    activations. A layer with a side effect, such as a counter, should have this effect in only one
    of the two passes.
    """
    _thread.asked = True
    return _thread.recomputing


def has_asked() -> bool:
    """Return whether any layer has called `is_recomputing` in the current pass."""
    return _thread.asked


class CheckpointPhase:
    """A context that sets which pass of a checkpointed task runs in this thread.

    Args:
        checkpointing: Whether the first pass runs. With `None`, this does not change.
        recomputing: Whether the second pass runs. With `None`, this does not change.
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
