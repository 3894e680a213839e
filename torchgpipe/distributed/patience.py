"""How long ranks wait for each other before they have met: they say so after a minute, and give up after five."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE, LIMIT = 60.0, 300.0
"""Seconds until a process says what it waits for, and until it gives up."""


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def end_process(line: str) -> None:
    """End this process by a line on standard error, whatever its threads wait for."""
    say(line)
    os._exit(1)


@contextmanager
def waiting_for(what: str, give_up: Callable[[str], object] = end_process) -> Iterator[None]:
    """Within this, say after a minute what is waited for; after five, call `give_up` with a line that says so."""
    lines = {NOTICE: say, LIMIT: give_up}
    timers = [threading.Timer(after, tell, [f"waited {after:g} s for {what}"]) for after, tell in lines.items()]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
