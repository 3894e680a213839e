"""Run a pipeline's partitions in processes of their own, which torchrun starts, a step at a time."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.records.record import Engine
from reproduce.run.engines import Work
from torchgpipe.plan.replay import Event, Timeline

PATIENCE = 30.0  # seconds: how long torchrun may take to end its processes
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")  # no network may know its name


class Processes:
    """As many processes as a pipeline has partitions, with as many threads each as this one has.

    They end by `close()`, with this process, or when one of them fails.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._torchrun = subprocess.Popen(
            [sys.executable, *TORCHRUN, f"--nproc-per-node={count}", "-m", "reproduce.run.ranks"],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for this process
        )

    def make(self, engine: Engine, work: Callable[[], Work]) -> None:
        """Make on every rank what `work` returns, a function that another process can import, and run it by `engine`.

        What was made before is given up.

        Raises:
            Error, torch.OutOfMemoryError: a rank has failed.
        """
        self._ask((engine, work))

    def step(self) -> tuple[float, float]:
        """Run a training step; return the seconds from when all ranks were ready until all were done, and the loss.

        Raises:
            Error, torch.OutOfMemoryError: a rank has failed.
        """
        seconds, loss = self._ask(None)
        return seconds, loss

    def record(self) -> Timeline:
        """Run a training step of ranks, and return its timeline.

        Raises:
            Error, torch.OutOfMemoryError: a rank has failed.
        """
        seconds, events = self._ask("record")
        return Timeline([Event(*each) for each in events], seconds, self._count)

    def close(self) -> None:
        """End all processes."""
        assert self._torchrun.stdin is not None and self._torchrun.stdout is not None
        self._torchrun.terminate()
        with suppress(BrokenPipeError):
            self._torchrun.stdin.close()
        try:
            self._torchrun.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._torchrun.kill()
            self._torchrun.wait()
        self._torchrun.stdout.close()
        self._errors.close()

    def _ask(self, request: Any) -> Any:
        assert self._torchrun.stdin is not None and self._torchrun.stdout is not None
        with suppress(BrokenPipeError):  # why is said below
            self._torchrun.stdin.write(base64.b64encode(pickle.dumps(request)) + b"\n")
            self._torchrun.stdin.flush()
        while "waits" in (said := json.loads((line := self._torchrun.stdout.readline()) or b"{}")):
            print(said["waits"], file=sys.stderr)
        if "answer" in said:
            return said["answer"]
        failures = [json.loads(each) for each in (line, *self._torchrun.stdout) if each]
        if not failures:
            raise Error(f"a rank's process has ended{self._signal()}")
        # The rank that failed says what happened, and others only that it did.
        first = next((each for each in failures if not each["reason"].startswith("RankFailed")), failures[0])
        if first["status"] == "out of memory":
            raise torch.OutOfMemoryError(first["reason"])
        raise Error(first["reason"])

    def _signal(self) -> str:
        self._torchrun.wait()
        self._errors.seek(0)
        found = re.findall(r"Signal \d+ \((\w+)\)", self._errors.read().decode(errors="replace"))
        # When one has ended, torchrun terminates the others, and lists all of them.
        found.sort(key=lambda name: name == "SIGTERM")
        return f" by {found[0]}" if found else ""
