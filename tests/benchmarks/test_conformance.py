"""Tests of `benchmarks.conformance`, which checks the results of pipelines of several projects.

The tests run only a few of its test cases. They also run it with faulty pipelines, whose faults it
must report.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import works_with
from benchmarks.conformance import CHECKS, ENGINES, main, table
from benchmarks.harness import WIDTH
from benchmarks.others.ours import Ranks, Threads
from benchmarks.others.processes import Adapter, compared, run
from benchmarks.render import BENCHMARKS
from reproduce.records.record import Record, Result, load

from ..behaviours.pipe import NotOffered, Pipe, rank
from ..parts import explode
from ..start import forking


@pytest.fixture(autouse=True)
def server() -> None:
    """Start, before `benchmarks.conformance` does, the server from which tests fork processes.

    A server that this program starts would lack some modules that later tests need.
    """
    forking()


# Pipelines with a fault in their step. Other processes import these classes by name.
class Refuses(Threads):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        explode(ValueError("batches of eight"))
        return self


class Fails(Threads):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        torch.zeros(2) + torch.zeros(3)
        return self


class HasNone(Threads):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        explode(NotOffered("it takes no step"))
        return self


class BatchIO(Ranks):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


class Hangs(Ranks):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        if rank() == 1:
            time.sleep(1000)
        return self


# A pipeline, the name of a check, how the check ends, and the beginning of the message.
EQUAL = "equal micro-batches"
FAULTS: list[Any] = [
    (ENGINES["threads"], EQUAL, "equal", ""),
    (ENGINES["ranks"], "batch norm, by mini-batch", "equal", ""),
    (ENGINES["ranks"], "in the criterion", "equal", ""),
    (Adapter(__name__, "Refuses"), EQUAL, "refused", "ValueError: batches of eight"),
    (Adapter(__name__, "Fails"), EQUAL, "fails", "RuntimeError: The size of tensor a"),
    (Adapter(__name__, "HasNone"), EQUAL, "not offered", "it takes no step"),
    (Adapter(__name__, "BatchIO", ranks=True), EQUAL, "ends", "SIGKILL"),
    pytest.param(
        Adapter(__name__, "Hangs", ranks=True),
        EQUAL,
        "hangs",
        "not finished after 4 seconds",
        marks=pytest.mark.slow,
    ),
]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Adapter) else ""


@pytest.mark.parametrize("adapter, check, kind, said", FAULTS, ids=name_of)
def test_how_a_check_ends(adapter: Adapter, check: str, kind: str, said: str) -> None:
    limit = 4.0 if adapter.name == "Hangs" else 60.0
    outcome = run(CHECKS[check], adapter, limit)
    assert outcome.kind == kind, outcome
    assert outcome.said.startswith(said), outcome


Found = dict[str, Tensor | bool | None]
ONE = torch.ones(2)
TWO = torch.full((2,), 2.0)
# The results of each rank, and the common message for all ranks.
FOUND: list[tuple[list[Found], str]] = [
    ([{"x": ONE, "y": ONE}, {"y": ONE, "so": True}], ""),
    (
        [{"x": ONE, "y": ONE}, {"y": TWO, "so": True}],
        "y differs by 1, where the largest value is 1",
    ),
    ([{"x": ONE}, {"y": ONE}], "so: on no rank"),
    ([{"x": ONE, "so": True}, {"y": ONE, "so": False}], "not so: so"),
    ([{"x": ONE, "so": True}, {"y": ONE, "z": ONE}], "z: there, but not in the model"),
]


@pytest.mark.parametrize("ranks, said", FOUND)
def test_all_ranks_together_are_compared(ranks: list[Found], said: str) -> None:
    plain: Found = {"x": ONE, "y": ONE, "so": True}
    outcome = compared(list(ranks), plain)
    assert outcome.said == said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    right, wrong = "one micro-batch", "dropout equal over balances"

    main(["--engine", "threads", "--out", str(path), right, wrong])

    page = re.sub(r" *\| *", "|", table(load(path), "pipe"))
    page = re.sub(r":-+", ":-", page)
    assert "|threads|this library|1||||1|||" in page
    assert f"\n## How a mini-batch is split\n\n||here|\n|:-|:-|\n|{right}|right|\n" in page
    assert f"\n|{wrong}|differs|\n" in page
    words = " ".join(page.split())
    assert f"- **{right}**: Whoever tries a pipeline" in words
    assert ' With worker threads, the result *differs*: "both are equal" is false.' in words

    with pytest.raises(SystemExit):
        main(["one batch"])
    said = capsys.readouterr().err
    assert "there is no check 'one batch'; the checks are equal micro-batches, one" in said


def record(**outcomes: str) -> Record:
    """Make a record of one check (test case). Each engine has a given outcome, such as "equal"."""
    results = []
    for engine, outcome in outcomes.items():
        values = {"outcome": outcome}
        reason = None if outcome == "equal" else f"{outcome}, as {engine} says"
        results.append(Result(EQUAL, engine, "measured", values=values, reason=reason))
    return Record("conformance", "", "measured", {}, results, software={"deepspeed": "1"})


@pytest.mark.parametrize(
    "outcomes, here, deepspeed, said",
    [
        ({"threads": "equal", "ranks": "equal", "DeepSpeed": "equal"}, "right", "right", ""),
        (
            {"threads": "equal", "ranks": "refused", "DeepSpeed": "not offered"},
            "ranks refused",
            "lacks",
            " With ranks, this is *refused*: refused, as ranks says. With DeepSpeed, there is no "
            "way to do this (*lacks*): not offered, as DeepSpeed says.",
        ),
        (
            {"threads": "fails", "ranks": "differs", "DeepSpeed": "fails"},
            "threads fails, ranks differs",
            "fails",
            " With worker threads, this *fails*: fails, as threads says. With ranks, the result "
            "*differs*: differs, as ranks says. With DeepSpeed, this *fails*: fails, as DeepSpeed "
            "says.",
        ),
    ],
)
def test_a_row_has_a_word_for_this_library_and_for_each_other_engine(
    outcomes: dict[str, str], here: str, deepspeed: str, said: str
) -> None:
    page = table(record(**outcomes), "pipe")
    assert f"|{EQUAL}|{here}|{deepspeed}|" in re.sub(r" *\| *", "|", page)
    assert " ".join(page.split()).endswith(f"those of the mini-batch.{said}")


def test_tables_of_the_page_fit_a_terminal() -> None:
    path = BENCHMARKS / "conformance.json"
    lines = works_with.table(load(path), "pipe").splitlines()
    assert len(lines) > 200
    for line in lines:
        assert len(line) <= WIDTH, line


@pytest.mark.parametrize(
    "name, graph, workers",
    [
        ("deepcopy of a used model", "right", "right"),
        ("forward-mode gradients", "only never", "refused"),
        ("a mode that counts, as `FlopCounterMode`", "right", "refused"),
        ("`torch.jit.trace(model, x)` in training", "refused", "refused"),
    ],
)
def test_with_which_engines_a_tool_works(name: str, graph: str, workers: str) -> None:
    (row,) = [row for row in works_with.TOOLS if row.name == name]
    assert works_with.answer(row, "graph") == graph
    assert works_with.answer(row, "workers") == workers
