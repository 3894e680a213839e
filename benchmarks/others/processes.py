"""Run a row with an adapter in separate processes, and compare the result with the plain layers'.

Processes are forked from a server that has imported torch already. Their process group meets at a shared file. A rank
sends the row's losses, gradients and parameters on it, and `run` compares them.
"""

import importlib
import io
import os
import re
import sys
import tempfile
import time
import traceback
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from reproduce.run.engines.launch import Ended, Launched
from tests.behaviours.compare import difference
from tests.behaviours.pipe import Found, NotOffered, Pipe, Training

LIMIT = 60.0  # seconds for a row
PATIENCE = timedelta(seconds=12)  # timeout of an operation of the process group
AFTER = 2.0  # seconds to wait for other ranks after one has failed or ended
TOLERANCE = 1e-4  # relative to the largest value of a tensor

Kind = Literal["equal", "not offered", "refused", "fails", "differs", "ends", "hangs"]


class Adapter(NamedTuple):
    """What runs a row: module and name of a `Pipe` class, and a folder of packages only for its processes."""

    module: str
    name: str
    ranks: bool = False
    folder: str = ""

    def load(self) -> type[Pipe]:
        """Import the class. Packages in its folder come first."""
        if self.folder:  # it has another torchgpipe
            sys.path.insert(0, self.folder)
            for name in [
                name for name in sys.modules if name.split(".")[0] in ("torchgpipe", "tests")
            ]:
                del sys.modules[name]
        found: type[Pipe] = getattr(importlib.import_module(self.module), self.name)
        return found


PRELOADED = ["benchmarks.harness", "benchmarks.others.ours", "benchmarks.others.pipelining"]
PRELOADED += ["torch.distributed.pipelining", "tests.behaviours.rows.training"]
PLAIN = Adapter("benchmarks.others.ours", "Layers")


class Outcome(NamedTuple):
    """How a row ended, and a message."""

    kind: Kind
    said: str = ""


def run(row: Training, adapter: Adapter, limit: float = LIMIT) -> Outcome:
    """Run a row with an adapter, and compare its result with that of the plain layers."""
    expected = run_ranks(row, PLAIN, limit)
    if isinstance(expected, Outcome) or any(x is False for x in expected[0].values()):
        raise AssertionError(f"{row.name}: the plain layers end in {expected}")
    found = run_ranks(row, adapter, limit)
    if (
        isinstance(found, Outcome) and found.kind == "hangs"
    ):  # retry: the machine may have been busy
        found = run_ranks(row, adapter, limit)
    return found if isinstance(found, Outcome) else compared(found, expected[0])


def compared(ranks: list[Found], plain: Found) -> Outcome:
    """Return whether the results of all ranks together equal the result of the plain layers."""
    for name, y in (item for found in ranks for item in found.items()):
        if name not in plain or y is False:
            return Outcome(
                "differs",
                f"not so: {name}" if y is False else f"{name}: there, but not in the model",
            )
        if said := difference(y, plain[name], TOLERANCE):
            return Outcome("differs", f"{name} {said}")
    missing = [name for name in plain if not any(name in found for found in ranks)]
    return Outcome("differs", f"{missing[0]}: on no rank") if missing else Outcome("equal")


def run_ranks(row: Training, adapter: Adapter, limit: float) -> list[Found] | Outcome:
    """Run a row on a rank per partition; return the result of each rank, or how the row failed."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    ranks = row.partitions if adapter.ranks else 1
    left: dict[int, tuple[Found, Outcome | None]] = {}  # of a rank: its result, or how it failed
    ended: dict[int, str] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(
            Launched("forkserver", ranks, _rank, row.name, adapter, ranks, Path(folder))
        ) as launched,
    ):
        running, end = {*range(ranks)}, time.monotonic() + limit
        while running and (
            received := [*launched.receive(running, max(0.01, end - time.monotonic()))]
        ):
            for k, said in received:
                running.remove(k)
                if isinstance(said, Ended):
                    ended[k] = (
                        f"{said.how.split(maxsplit=1)[1]}{_printed(Path(folder, f'{k}.log').read_text())}"
                    )
                else:
                    left[k] = torch.load(io.BytesIO(said), weights_only=False)
                if k in ended or left[k][1] is not None:
                    end = min(end, time.monotonic() + AFTER)
    # Report the original failure, not the error of a rank that only learned of it.
    errors = [outcome for _, outcome in left.values() if outcome is not None]
    first = min(errors, key=_after_another, default=None)
    if first is not None and (not ended or (first.kind == "refused" and not _after_another(first))):
        return first
    if ended:
        return Outcome("ends", next(iter(ended.values()))[:300])
    if running:
        return Outcome("hangs", f"not finished after {limit:g} seconds")
    return [left[k][0] for k in range(ranks)]


def _after_another(outcome: Outcome) -> bool:
    """Return whether a rank failed only because another one had failed."""
    return outcome.said.startswith("RankFailed")


def _printed(log: str) -> str:
    """Return the last line of a process's log that looks like an error."""
    lines = [line.strip() for line in log.splitlines() if "what()" in line or "Error" in line]
    return f": {_without_folders(lines[-1])}" if lines else ""


def _without_folders(said: str) -> str:
    return re.sub(r"(/[\w.+-]+)+/", "", said)


def _rank(
    number: int, link: Connection, name: str, adapter: Adapter, ranks: int, folder: Path
) -> None:
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    found: Found = {}
    outcome, package = None, ""
    try:
        pipe = adapter.load()
        package = pipe.package
        if ranks > 1:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
            store = f"file://{folder}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=number, world_size=ranks, timeout=PATIENCE
            )
        row = next(
            row
            for row in importlib.import_module("tests.behaviours.rows.training").ROWS
            if row.name == name
        )
        result = row.action(pipe(row, folder))
        found = (
            result.found() if hasattr(result, "found") else result
        )  # its class may be a reimported one
        found = {
            name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in found.items()
        }
    except BaseException as error:
        traceback.print_exc()
        outcome = judged(error, package)
    content = io.BytesIO()
    torch.save((found, outcome), content)
    link.send(content.getvalue())
    if outcome is None:
        link.poll(None)  # wait to be killed: other ranks would fail if connections closed now
    os._exit(1)


def judged(error: BaseException, package: str) -> Outcome:
    """Classify an error. It is a refusal if the package's own code raised it, with a message."""
    if type(error).__name__ == NotOffered.__name__:
        return Outcome("not offered", str(error))
    while error.__cause__ is not None:  # outer errors only add where it happened
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = f"/{package}/" in last.filename and (last.line or "").startswith("raise ")
    said = " ".join(str(error).split())
    name = type(error).__name__
    text = f"{name}: {_without_folders(said)}"[:300] if said else f"{name} without a message"
    return Outcome("refused" if own and said else "fails", text)
