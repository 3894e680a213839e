"""Define the exit codes of all commands, and exceptions for problems that a user can solve.

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

WORSE = 1  # the result is slower or worse, or differs from its record
# There is no answer: the input is bad, a record cannot be read, or a side of a comparison fails.
CANNOT_TELL = 2
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
LEAST_TORCH = (2, 11)


class Error(Exception):
    """An error that ends the program with one line on stderr.

    The line says what was given or what failed, what is allowed, and what the user can do.
    """

    exit_code = CANNOT_TELL


class Worse(Error):
    """An error that is raised when a comparison shows that something is worse than it should be."""

    exit_code = WORSE


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the program after an exception that was not caught (used as `sys.excepthook`).

    An `Error` is printed as one line. A bug is printed with its traceback. This function sets the
    exit code, because Python's own exit code would mean `WORSE`.
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
    """Import the given packages; return an error text if a package is missing, broken or too old.

    The text says what to do. Return None if all packages are fine.
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
    """Return a text that says what to do if PyTorch is too old; otherwise return None."""
    version = sys.modules["torch"].__version__
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return f"torch {version} is too old: install torch {least} or newer"


def leave(signum: int, frame: FrameType | None) -> None:
    """End the program at once. Nothing can be lost, because the program has not begun to work."""
    os.write(2, b"reproduce: interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C ends a run; yield a function that the run calls between steps.

    The function raises `KeyboardInterrupt` if there was a Ctrl-C. Python also raises it at any
    place in the main thread. But in a destructor or in the callback of a weak reference, where
    tensors are often freed, Python only prints the exception and continues. So a flag remembers the
    Ctrl-C.
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
