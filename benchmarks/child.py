"""Measure in processes of their own, so that versions of torchgpipe can take turns: both ends of the talk.

A child answers each line of JSON with a line of JSON: a pair of its answer and of why there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from reproduce.error import Error
from reproduce.regression.trees import committed

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """Run `script` with the torchgpipe in `path`."""

    def __init__(self, script: str, path: Path = ROOT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process; the child ends when there is nobody left to ask
        )
        try:
            self.version: str = self.receive()
        except BaseException:
            self.close()
            raise

    def send(self, *request: Any) -> None:
        """Ask for something.

        Raises:
            Error: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Return the answer to what was sent.

        Raises:
            Error: there is none.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer, why = json.loads(line)
        if why is not None:
            raise Error(why)
        return answer

    def ask(self, *request: Any) -> Any:
        """Send a request and return the answer."""
        self.send(*request)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError), self._process:  # what was written and not read any more
            self._process.kill()

    def _ended(self) -> Error:
        return Error(f"the measuring process ended with exit code {self._process.wait()}")


@contextmanager
def children(script: str, other: Path | str | None) -> Iterator[tuple[Child, Child | None]]:
    """Yield a child with this torchgpipe, and one with that of another folder or revision; end them afterwards."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        here = stack.enter_context(closing(Child(script)))
        if other is None:
            yield here, None
            return
        path = other if isinstance(other, Path) else committed(ROOT, other, Path(folder) / "other").folder
        child = stack.enter_context(closing(Child(script, path)))
        if isinstance(other, str):
            child.version = f"torchgpipe {other}"
        yield here, child


def serve(answer: Callable[..., Any]) -> None:
    """Be a child: say which torchgpipe is first on the path, then answer each request with `answer(*request)`."""
    import torchgpipe

    def say(answer: Any, why: str | None = None) -> None:
        print(json.dumps([answer, why]), flush=True)

    torch.set_num_threads(1)
    say(f"torchgpipe {torchgpipe.__version__}")
    for line in sys.stdin:
        try:
            say(answer(*json.loads(line)))
        except torch.OutOfMemoryError:
            say(None, "out of memory")
        except (
            AttributeError,
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:  # another version may lack what is asked for
            say(None, f"{type(error).__name__}: {error}".splitlines()[0])
