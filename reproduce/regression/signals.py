"""Let what ends this program from outside end it in order."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["terminable", "undivided"]

Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, such as `timeout` sends, and SIGHUP, of a terminal that was closed, raise `SystemExit`."""
    with _handled((signal.SIGTERM, signal.SIGHUP), lambda number, frame: sys.exit(128 + number)):
        yield


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Put off what those signals and Ctrl-C raise until the context ends, as where a process is started and noted."""
    came: list[int] = []
    try:
        with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Handler) -> Iterator[None]:
    """Handle signals so. Only the main thread receives them; one that is ignored, as under `nohup`, stays so."""
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    # None is a handler that is not Python's, and could not be put back.
    ours = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in reversed(ours.items()):  # last the first, which is Ctrl-C where it is among them
            signal.signal(number, old)
