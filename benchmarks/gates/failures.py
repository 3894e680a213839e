"""End a gate with one line and exit code 2 if the pipeline that the gate checks does not run.

A gate is a program that judges a version of the library. The gate imports the library in the `with`
block of `in_one_line`. So even a syntax error in the library ends the gate with one line.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from reproduce.error import CANNOT_TELL, Error

PATIENCE = 200.0
"""Seconds after which a gate counts as hanging. It usually takes some seconds, or a minute if other
programs use the cores.
"""


@contextmanager
def in_one_line(gate: str, patience: float = PATIENCE) -> Iterator[None]:
    """Turn an exception in the `with` block into an `Error` whose message is a single line.

    If the block hangs, print a line that says so, and end the program.

    Args:
        gate: The name of the gate (the program that judges the library). The line begins with this
            name.
        patience: The seconds after which the block counts as hanging.

    Raises:
        Error: The block raised an exception.
    """
    watch = threading.Timer(patience, _give_up, (gate, patience))
    watch.daemon = True
    watch.start()
    try:
        yield
    except Error as error:  # of a rank, which has raised an exception
        raise Error(f"{gate}: the pipeline does not run: {error}") from None
    except Exception as error:
        said, *_ = str(error).splitlines() or [""]
        raise Error(f"{gate}: the pipeline does not run: {type(error).__name__}: {said}") from None
    finally:
        watch.cancel()


def _give_up(gate: str, patience: float) -> None:
    """Print that the gate hangs. End this program and its child processes at once.

    This runs in another thread, because the main thread may hang.
    """
    line = f"{gate}: the pipeline does not run: it has not ended after {patience:g} seconds"
    print(line, file=sys.stderr, flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(CANNOT_TELL)
