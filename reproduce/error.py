"""Define the exit codes of all commands, and exceptions for problems that a user can solve.

A command's exit code is 0 if the result is as expected. Other exit codes are constants here.
"""

import atexit
import contextlib
import difflib
import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

WORSE = 1  # the result is slower or worse, or differs from its record

# No result: the input is bad, a file cannot be read, or one of the compared versions fails.
CANNOT_TELL = 2
# The signals that ask a program to end. Like shells, it then ends with the exit code 128 + signal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
LEAST_TORCH = (2, 11)
# A message names all of up to `MOST_LISTED` names, and only `CLOSEST` names of a longer list.
CLOSEST = 3
MOST_LISTED = 12


class Error(Exception):
    """An error that ends the program with one line on stderr.

    The line says what was given or what failed, what is allowed, and what the user can do.
    """

    exit_code = CANNOT_TELL


class Signalled(KeyboardInterrupt):
    """The exception with which Ctrl-C, SIGTERM or SIGHUP ends a command.

    The command `timeout` and job schedulers send SIGTERM. A terminal that is closed sends SIGHUP.
    """

    def __init__(self, signum: int) -> None:
        told = f"ended by {signal.Signals(signum).name}"
        super().__init__("interrupted" if signum == signal.SIGINT else told)
        self.exit_code = 128 + signum


class Interrupted(Error):
    """The error for a command that was ended by a signal, such as Ctrl-C."""

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        super().__init__(str(interrupt) or "interrupted")
        self.exit_code = getattr(interrupt, "exit_code", INTERRUPTED)


class Unwritable(Error):
    """The error for a file that cannot be written, for example because the disk is full."""


class Worse(Error):
    """The error for a result that is slower or worse than it should be, or for an outdated file."""

    exit_code = WORSE


def suggestion(name: str, known: Iterable[str], listing: str | None = None) -> str:
    """Return a text for an error message: the known names that are most similar to a name.

    If no known name is similar, the text has all known names, or the first names of a long list.

    Args:
        name: The name that is not known.
        known: The known names.
        listing: A command that lists all names. If it is given, the text shortens a long list, and
            names this command.
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=CLOSEST)
    if close:
        return f"did you mean {' or '.join(close)}"
    if listing is None or len(names) <= MOST_LISTED:
        return f"there are {', '.join(names)}"
    first = ", ".join(names[:CLOSEST])
    return f"there are {first} and {len(names) - CLOSEST} more ('{listing}' lists all)"


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that was not caught, and end the program (used as `sys.excepthook`).

    An `Error` is printed as one line, and so is a full disk. Nothing is printed if the output went
    to a pipe whose reader has ended. Any other exception is a bug, and is printed with its
    traceback. The exit code is set here, because Python would exit with 1, which means `WORSE`.
    """
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        error = no_space(error)
    if isinstance(error, Error):
        print(error, file=sys.stderr)
    elif not (isinstance(error, BrokenPipeError) and _has_no_reader()):
        sys.__excepthook__(kind, error, trace)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(getattr(error, "exit_code", CANNOT_TELL))


def _has_no_reader() -> bool:
    """Return whether stdout is a pipe whose reader, such as `head`, has ended."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))


def no_space(error: OSError) -> Unwritable:
    """Return an error for output that cannot be written because the disk is full."""
    return Unwritable(f"cannot write: {error.strerror}; free space, or write the output elsewhere")


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
    """Handle a signal while the program starts, by ending the program at once.

    A starting program has no results yet that could be lost.
    """
    os.write(2, f"reproduce: {Signalled(signum)}\n".encode())
    os._exit(128 + signum)


def raise_signalled(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by raising an exception, so that `with` and `finally` blocks clean up."""
    raise Signalled(signum)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP by `handler` until the end of the `with` block.

    If SIGTERM or SIGHUP is already ignored (as under `nohup`), it stays ignored.
    """
    before = {}
    for number in ENDING:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C, SIGTERM or SIGHUP ends a run within the `with` block.

    The handler of the signal raises an exception in the main thread. Python drops this exception if
    the thread is in a destructor or in the callback of a weak reference. Such code often runs,
    because it frees tensors. So the handler also remembers the signal. This context manager yields
    a function that raises the exception again if there was a signal. The run has to call this
    function between steps.
    """
    received: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        raise Signalled(signum)

    def be_silent(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    def check() -> None:
        if received:
            raise Signalled(received[0])

    hook = sys.unraisablehook
    with handling(interrupt):
        sys.unraisablehook = be_silent
        try:
            yield check
        finally:
            sys.unraisablehook = hook
