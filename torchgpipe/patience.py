"""Limit how long ranks (processes) wait for each other when they connect.

A rank that waits prints a line after one minute. A program of `reproduce` or `examples` also ends
its process after five minutes.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE, LIMIT = 60.0, 300.0  # seconds


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def waiting_for(what: str, tell: Callable[[str], object] = say) -> Iterator[None]:
    """End the process if the code in this context still waits after five minutes.

    Args:
        what: A description of what the code waits for, such as another rank.
        tell: A function that gets a line of text after one minute of waiting, and another line
            after five minutes. The lines say what the code waits for.
    """

    def give_up() -> None:
        tell(f"gave up after {LIMIT:g} s of waiting for {what}")
        os._exit(1)  # whatever its threads wait for

    notice = f"waited {NOTICE:g} s for {what}"
    timers = threading.Timer(NOTICE, tell, [notice]), threading.Timer(LIMIT, give_up)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
