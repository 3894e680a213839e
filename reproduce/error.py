"""Define the exit codes of all commands, and exceptions for problems that a user can solve.

The exit code is 0 if the result is as expected.
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

# No result: the input is bad, a file cannot be read, or one of the compared versions fails.
CANNOT_TELL = 2
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
LEAST_TORCH = (2, 11)


class Error(Exception):
    """An error that ends the program with one line on stderr.

    The line says what was given or what failed, what is allowed, and what the user can do.
    """

    exit_code = CANNOT_TELL


class Worse(Error):
    """The error for a result that is slower or worse than it should be, or for an outdated file."""

    exit_code = WORSE


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that was not caught, and end the program (used as `sys.excepthook`).

    An `Error` is printed as one line. Any other exception is a bug, and is printed with its
    traceback. The exit code is set here, because Python would exit with 1, which means `WORSE`.
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
    """Import the given packages, and return None if all imports succeed.

    Otherwise return an error text about the first package that is missing, broken or too old. The
    text says what the user can do.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as error:  # noqa: PERF203 - names the package
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed: run 'make', or 'pip install {package}'"
            reason = " ".join(str(error).split())
            return f"{package} is broken ({reason}): reinstall it"
    return _too_old_torch() if "torch" in packages else None


def _too_old_torch() -> str | None:
    """Return an error text if the imported PyTorch is too old, else None."""
    version = sys.modules["torch"].__version__
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return f"torch {version} is too old: install torch {least} or newer"


def leave(signum: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C while the program starts: end the program at once.

    At that time, there are no results yet that could be lost.
    """
    os.write(2, b"reproduce: interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C ends a run.

    On Ctrl-C, Python raises `KeyboardInterrupt` in the main thread. This exception is lost if the
    thread is in a destructor or in the callback of a weak reference. Such code often runs, because
    it frees tensors. So a flag remembers Ctrl-C. Yield a function that raises `KeyboardInterrupt`
    if the flag is set. The run calls this function between steps.
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
