"""What a process of the soak reports, line by line in a file that the soak reads meanwhile; and time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Report:
    """A file that gets a line for each thing that happens; others read it meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, **more: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Lines:
    """What a process reports.

    Attributes:
        all: what has been read so far.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._file: int | None = None
        self.all: list[Line] = []

    def new(self) -> bool:
        """Read what is new; return whether there was anything."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return False
        if not (more := os.read(self._file, 1 << 20)):
            return False
        *whole, self._rest = (self._rest + more).split(b"\n")
        self.all += map(json.loads, whole)
        return True

    def last(self, what: str) -> Line | None:
        """Return the last report of a kind."""
        return next((line for line in reversed(self.all) if line["what"] == what), None)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Clock:
    """How long the soak itself was stopped and continued, as by Ctrl-Z and `fg`."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._continued = False
        self.stopped = 0.0
        signal.signal(signal.SIGCONT, self._note)

    def look(self) -> float:
        """Return for how long the soak was stopped since the last call; to be called often."""
        now, continued = time.monotonic(), self._continued
        gap = now - self._last if continued else 0.0
        self._last, self._continued = now, False
        self.stopped += gap
        return gap

    def _note(self, *_: object) -> None:
        self._continued = True
