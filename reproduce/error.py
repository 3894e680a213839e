"""The exit codes of all commands, and the exceptions for problems that a user can solve.

The exit code 0 means "as expected".
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

WORSE = 1  # slower, worse, or not as its record says
# The question has no answer: bad input, a record that cannot be read, or a side that does not run.
CANNOT_TELL = 2
INTERRUPTED = 130  # as shells have it for Ctrl-C
LEAST_TORCH = (2, 11)


class Error(Exception):
    """Stop with one line on stderr.

    The line says what was given or what failed, what is allowed, and what to do.
    """

    exit_code = CANNOT_TELL


class Worse(Error):
    """Stop because a comparison shows that something is not as it should be."""

    exit_code = WORSE


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the program, as `sys.excepthook`, with a line or, for a bug, with a traceback.

    The exit code is set here, because Python's own would be `WORSE`.
    """
    if isinstance(error, Error):
        print(error, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if kind is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    os._exit(getattr(error, "exit_code", CANNOT_TELL))


def missing(*packages: str) -> str | None:
    """Import packages. Return which one is missing, broken or too old, and what to do.

    Return None if all packages are fine.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed: run 'make', or 'pip install {package}'"
            reason = " ".join(str(error).split())
            return f"{package} is broken ({reason}): reinstall it"
    return _too_old_torch() if "torch" in packages else None


def _too_old_torch() -> str | None:
    """Return what to do if PyTorch is too old; None if it is not."""
    version = sys.modules["torch"].__version__
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return f"torch {version} is too old: install torch {least} or newer"


def leave(signum: int, frame: FrameType | None) -> None:
    """End the program at once: it has done nothing yet that could be lost."""
    os.write(2, b"reproduce: interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C ends a run: yield a function to call between steps.

    The function raises `KeyboardInterrupt` if there was a Ctrl-C. Python raises it, too, wherever
    the main thread happens to be. But in a destructor or a weak reference's callback, where tensors
    are often freed, Python only prints it and goes on. So a flag remembers it.
    """
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

    handler = signal.signal(signal.SIGINT, interrupt)
    hook = sys.unraisablehook
    sys.unraisablehook = be_silent
    try:
        yield check
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)
