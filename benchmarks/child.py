"""A process that measures one torchgpipe, so that two versions can be measured side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Child"]

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """Run `script`, which answers lines of JSON with lines of JSON, with the torchgpipe in `path`."""

    def __init__(self, script: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process; the child ends when there is nobody left to ask
        )
        self.version: str = self._read()

    def ask(self, *request: Any) -> Any:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the measuring process ended with exit code {self._process.wait()}")
        return json.loads(line)
