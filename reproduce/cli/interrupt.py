"""Make sure that Ctrl-C ends a run, also where Python would swallow it.

`KeyboardInterrupt` is raised wherever the main thread happens to be. In a destructor or a weak reference's callback,
where tensors are often freed, Python prints it and goes on. So a flag remembers Ctrl-C and is checked between steps.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function to call between steps: it raises `KeyboardInterrupt` if there was a Ctrl-C."""
    asked = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def be_silent(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    handler, hook = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = be_silent
    try:
        yield check
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)
