"""Run a check with a pipeline library in separate processes, and judge the result.

A check is a short training. The folder tests/behaviours/rows/training has the checks. An adapter is
a class that runs a check with a pipeline library.

The processes are forked from a server that has already imported torch. They create their process
group through a shared file. Each rank sends its losses, gradients and parameters. The function
`run` compares them with the results of the same layers without a pipeline.
"""

import importlib
import io
import os
import re
import sys
import time
import traceback
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from reproduce.run.engines.launch import Ended, Launched
from tests.behaviours.compare import difference
from tests.behaviours.pipe import Found, NotOffered, Pipe, Training

LIMIT = 60.0
"""The time limit for a row, in seconds."""
PATIENCE = timedelta(seconds=12)
"""The timeout of an operation of the process group."""
AFTER = 2.0
"""Seconds to wait for other ranks after one rank has failed or ended."""
TOLERANCE = 1e-4
"""The tolerance of comparisons, relative to the largest value of a tensor."""
FALSE = "not so: "
"""What a message begins with if it names a statement that does not hold."""
NOWHERE = ": on no rank"
"""What a message ends with if it names a tensor that no rank has."""

Kind = Literal["equal", "not offered", "refused", "fails", "differs", "ends", "hangs"]


class Adapter(NamedTuple):
    """The module and the name of a class that runs checks with a pipeline library.

    Attributes:
        module: The module of the class.
        name: The name of the class.
        ranks: Whether each partition runs in a process of its own.
        folder: A folder with packages that only this adapter's processes import, or "".
    """

    module: str
    name: str
    ranks: bool = False
    folder: str = ""

    def load(self) -> type[Pipe]:
        """Import the class; packages in `folder` replace other packages of the same name."""
        if self.folder:  # the folder has another torchgpipe
            sys.path.insert(0, self.folder)
            for name in list(sys.modules):
                if name.split(".")[0] in ("torchgpipe", "tests"):
                    del sys.modules[name]
        module = importlib.import_module(self.module)
        found: type[Pipe] = getattr(module, self.name)
        return found


PRELOADED = ["benchmarks.harness", "benchmarks.others.ours", "benchmarks.others.pipelining"]
PRELOADED += ["torch.distributed.pipelining", "tests.behaviours.rows.training"]
PLAIN = Adapter("benchmarks.others.ours", "Layers")


class Work(NamedTuple):
    """What one rank has to do: run a check with a pipeline library.

    Attributes:
        name: The name of the check (a short training).
        adapter: The adapter, by which the check uses the pipeline library.
        ranks: The number of ranks.
        folder: A folder that all ranks share.
    """

    name: str
    adapter: Adapter
    ranks: int
    folder: Path


class Outcome(NamedTuple):
    """The result of a check, which is a short training with one pipeline library.

    Attributes:
        kind: "equal" if all results equal those of the layers without a pipeline. If not, a word
            for what went wrong, such as "differs", "refused" or "hangs".
        said: The reason, such as an error message. It is empty if the results are equal.
    """

    kind: Kind
    said: str = ""


def run(row: Training, adapter: Adapter, limit: float = LIMIT) -> Outcome:
    """Run a check (a short training) by an adapter, that is, with one pipeline library.

    Return whether the results equal those of the same layers without a pipeline or, if the check
    failed, how it failed.
    """
    expected = run_ranks(row, PLAIN, limit)
    if isinstance(expected, Outcome) or any(x is False for x in expected[0].values()):
        raise AssertionError(f"{row.name}: the plain layers end in {expected}")
    found = run_ranks(row, adapter, limit)
    if isinstance(found, Outcome) and found.kind == "hangs":
        found = run_ranks(row, adapter, limit)  # the machine may have been busy
    return found if isinstance(found, Outcome) else compared(found, expected[0])


def compared(ranks: list[Found], plain: Found) -> Outcome:
    """Compare the results of all ranks with those of the layers without a pipeline (`plain`).

    The outcome is "equal", or "differs" with a message about the first difference.
    """
    missing = dict.fromkeys(plain)
    for found in ranks:
        for name, y in found.items():
            if y is False:
                return Outcome("differs", f"{FALSE}{name}")
            if name not in plain:
                return Outcome("differs", f"{name}: there, but not in the model")
            if said := difference(y, plain[name], TOLERANCE):
                return Outcome("differs", f"{name} {said}")
            missing.pop(name, None)
    for name in missing:
        return Outcome("differs", f"{name}{NOWHERE}")
    return Outcome("equal")


def run_ranks(row: Training, adapter: Adapter, limit: float) -> list[Found] | Outcome:
    """Run a check (a short training) on one rank for each partition.

    If the library that is checked uses threads and not ranks, the check runs in a single process.

    Return a list of each rank's results (losses, gradients and parameters by name). If the check
    failed, return an outcome that says how it failed.
    """
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    ranks = row.partitions if adapter.ranks else 1
    results: dict[int, Found] = {}
    errors: list[Outcome] = []
    ends: list[str] = []
    with (
        TemporaryDirectory() as folder,
        closing(
            Launched("forkserver", ranks, _rank, Work(row.name, adapter, ranks, Path(folder)))
        ) as launched,
    ):
        running = set(range(ranks))
        end = time.monotonic() + limit
        while running:
            left = max(0.01, end - time.monotonic())
            received = list(launched.receive(running, left))
            if not received:
                break
            for k, answer in received:
                running.remove(k)
                if isinstance(answer, Ended):
                    log = Path(folder, f"{k}.log").read_text()
                    how = answer.how.split(maxsplit=1)[1]
                    ends.append(f"{how}{_printed(log)}")
                else:
                    results[k], error = torch.load(io.BytesIO(answer), weights_only=False)
                    if error is None:
                        continue
                    errors.append(error)
                end = min(end, time.monotonic() + AFTER)
    if failure := _failure(errors, ends):
        return failure
    if running:
        return Outcome("hangs", f"not finished after {limit:g} seconds")
    return [results[k] for k in range(ranks)]


def _failure(errors: list[Outcome], ends: list[str]) -> Outcome | None:
    """Return why a check failed, as the outcome of one rank, or `None` if no rank failed.

    If an error only says that another rank has failed, another error is returned, if there is one.
    """
    first = min(errors, key=_after_another, default=None)
    if not ends:
        return first
    if first is not None and first.kind == "refused" and not _after_another(first):
        return first
    return Outcome("ends", ends[0][:300])


def _after_another(outcome: Outcome) -> bool:
    """Return whether a rank has failed only because it was told that another rank had failed."""
    return outcome.said.startswith("RankFailed")


def _printed(log: str) -> str:
    """Return the last line of a process's output that looks like an error, or an empty text."""
    last = ""
    for line in log.splitlines():
        if "what()" in line or "Error" in line:
            last = line.strip()
    return f": {_without_folders(last)}" if last else ""


def _without_folders(said: str) -> str:
    return re.sub(r"(/[\w.+-]+)+/", "", said)


def _rank(number: int, link: Connection, how: Work) -> None:
    """Run a check as one rank, and send the rank's results and any failure to the main process."""
    log = os.open(how.folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    found: dict[str, Tensor | bool | None] = {}
    outcome, package = None, ""
    try:
        pipe = how.adapter.load()
        package = pipe.package
        if how.ranks > 1:
            _join(number, how)
        # The modules that define the checks are imported again, because `load` has removed them if
        # the adapter (the class that uses a pipeline library) brings its own torchgpipe.
        rows = importlib.import_module("tests.behaviours.rows.training").ROWS
        row = next(row for row in rows if row.name == how.name)
        result = row.action(pipe(row, how.folder))
        if hasattr(result, "found"):
            result = result.found()
        for key, x in result.items():
            found[key] = x.detach() if isinstance(x, Tensor) else x
    except BaseException as error:
        traceback.print_exc()
        outcome = judged(error, package)
    content = io.BytesIO()
    torch.save((found, outcome), content)
    link.send(content.getvalue())
    if outcome is None:
        link.poll(None)  # wait to be killed: other ranks would fail if connections closed now
    os._exit(1)


def _join(number: int, how: Work) -> None:
    """Join the process group of all ranks."""
    rank, ranks = str(number), str(how.ranks)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    options: Any = {"rank": number, "world_size": how.ranks, "timeout": PATIENCE}
    dist.init_process_group("gloo", init_method=f"file://{how.folder}/store", **options)


def judged(error: BaseException, package: str) -> Outcome:
    """Classify an error that ended a check as "not offered", "refused" or "fails".

    - "not offered": the adapter says that the library has no such feature.
    - "refused": the library's own code raised the error, with a message.
    - "fails": any other error.
    """
    if type(error).__name__ == NotOffered.__name__:
        return Outcome("not offered", str(error))
    while error.__cause__ is not None:  # outer errors only add where the first error was raised
        error = error.__cause__
    name = type(error).__name__
    words = str(error).split()
    if not words:
        return Outcome("fails", f"{name} without a message")
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").startswith("raise ")
    own = raised and f"/{package}/" in last.filename
    message = _without_folders(" ".join(words))
    text = f"{name}: {message}"
    return Outcome("refused" if own else "fails", text[:300])
