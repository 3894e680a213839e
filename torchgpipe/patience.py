"""Limit how long ranks wait for each other when they connect.

Ranks print a line after a minute, and give up after five minutes.
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
    """Limit how long the code in this context may wait for `what`.

    After a minute, `tell` is called with a line of text that says so. After five minutes, it is
    called again, and the process ends.
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
