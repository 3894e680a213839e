"""The exit codes of all commands; 0 is "as expected". The exceptions for what a user can do something about."""

import atexit
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

WORSE = 1  # slower, worse, or not as its record says
CANNOT_TELL = 2  # what was asked for cannot be had: bad input, a record that cannot be read, a side that does not run
INTERRUPTED = 130  # as shells have it for Ctrl-C
LEAST_TORCH = (2, 11)


class Error(Exception):
    """Stop with one line on stderr. It says what was given or what failed, what is allowed, and what to do."""

    exit_code = CANNOT_TELL


class Worse(Error):
    """Stop, as something was compared and is not as it should be."""

    exit_code = WORSE


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End as `sys.excepthook`, with a line or a bug's traceback, and a code: Python's own would be `WORSE`."""
    if isinstance(error, Error):
        print(error, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(INTERRUPTED if kind is KeyboardInterrupt else getattr(error, "exit_code", CANNOT_TELL))


def missing(*packages: str) -> str | None:
    """Import packages; return which is missing, broken or too old, and what to do; None if all are fine."""
    for package in packages:
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed: run 'make', or 'pip install {package}'"
            return f"{package} is broken ({' '.join(str(error).split())}): reinstall it"

    version = sys.modules["torch"].__version__ if "torch" in packages else None
    if version and tuple(int(part) for part in version.split(".")[:2]) < LEAST_TORCH:
        return (
            f"torch {version} is too old: install torch {'.'.join(map(str, LEAST_TORCH))} or newer"
        )
    return None


def leave(signum: int, frame: FrameType | None) -> None:
    """End the program at once. It has done nothing yet that could be lost."""
    os.write(2, b"reproduce: interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C ends a run: yield a function to call between steps, which raises if there was a Ctrl-C.

    `KeyboardInterrupt` is raised wherever the main thread happens to be. In a destructor or a weak reference's
    callback, where tensors are often freed, Python prints it and goes on. So a flag remembers it.
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

    handler, hook = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = be_silent
    try:
        yield check
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)
