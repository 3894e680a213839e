"""See to it that Ctrl-C ends a run, also where Python would swallow it.

`KeyboardInterrupt` is raised wherever the main thread happens to be. In a destructor or a weak reference's callback,
and tensors die in such places all the time, Python prints it and goes on. So the request is also
remembered, and asked for between steps.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if there was a Ctrl-C since; to be called now and then.

    Outside the main thread, which alone receives signals, it does nothing.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        asked.set()
        raise KeyboardInterrupt

    def be_silent(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    handler, hook = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = be_silent
    try:
        yield check
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)
