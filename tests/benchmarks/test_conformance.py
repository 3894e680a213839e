"""`benchmarks.conformance`: whether it finds planted faults, how it says so, and a few of its rows."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conformance import CHECKS, ENGINES, main, table
from benchmarks.others.ours import Ranks, Threads
from benchmarks.others.processes import Adapter, compared, run
from reproduce.records.record import load

from ..behaviours.pipe import NotOffered, Pipe, rank


class Refuses(Threads):
    package = "tests"

    def step(self, *given: Any) -> Pipe:
        raise ValueError("batches of eight are refused")


class Fails(Threads):
    def step(self, *given: Any) -> Pipe:
        torch.zeros(2) + torch.zeros(3)
        return self


class HasNone(Threads):
    def step(self, *given: Any) -> Pipe:
        raise NotOffered("it takes no step")


class Ends(Ranks):
    def step(self, *given: Any) -> Pipe:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*given)


class Hangs(Ranks):
    def step(self, *given: Any) -> Pipe:
        time.sleep(1000 * rank())
        return self


def wrong(kind: type[Pipe]) -> Adapter:
    return Adapter(__name__, kind.__name__, kind.ranks)


FAULTS: list[tuple[Adapter, str, str, str]] = [
    (ENGINES["threads"], "equal micro-batches", "equal", ""),
    (ENGINES["ranks"], "batch norm, by mini-batch", "equal", ""),
    (ENGINES["ranks"], "in the criterion", "equal", ""),
    (wrong(Refuses), "equal micro-batches", "refused", "ValueError: batches of eight are refused"),
    (wrong(Fails), "equal micro-batches", "fails", "RuntimeError: The size of tensor a"),
    (wrong(HasNone), "equal micro-batches", "not offered", "it takes no step"),
    (wrong(Ends), "equal micro-batches", "ends", "SIGKILL"),
    (wrong(Hangs), "equal micro-batches", "hangs", "not finished after 4 seconds"),
]


@pytest.mark.parametrize("adapter, check, kind, said", FAULTS, ids=lambda x: x.name if isinstance(x, Adapter) else "")
def test_how_a_check_ends(adapter: Adapter, check: str, kind: str, said: str) -> None:
    outcome = run(CHECKS[check], adapter, limit=4.0 if adapter.name == "Hangs" else 60.0)
    assert outcome.kind == kind and outcome.said.startswith(said), outcome


ONE = torch.ones(2)
FOUND: list[tuple[list[dict[str, Tensor | bool | None]], str]] = [
    ([{"x": ONE, "y": ONE}, {"y": ONE, "so": True}], ""),
    ([{"x": ONE, "y": ONE}, {"y": ONE * 2, "so": True}], "y differs by 1, where the largest value is 1"),
    ([{"x": ONE}, {"y": ONE}], "so: on no rank"),
    ([{"x": ONE, "so": True}, {"y": ONE, "so": False}], "not so: so"),
    ([{"x": ONE, "so": True}, {"y": ONE, "z": ONE}], "z: there, but not in the model"),
]


@pytest.mark.parametrize("ranks, said", FOUND)
def test_all_ranks_together_are_compared(ranks: list[dict[str, Tensor | bool | None]], said: str) -> None:
    assert compared([*ranks], {"x": ONE, "y": ONE, "so": True}).said == said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    main(["--engine", "threads", "--json", str(path), "one micro-batch", "dropout equal over balances"])
    page = "\n".join(
        "|".join(cell.strip() for cell in line.split("|")) for line in table(load(path), "pipe").split("\n")
    )
    assert "|threads|this library|1||||1|||" in page
    assert "|one micro-batch|right|Whoever tries a pipeline" in page
    assert "|dropout equal over balances|differs (threads): not so: both are equal|A seed gives" in page
    with pytest.raises(SystemExit):
        main(["one batch"])
    assert "there is no check 'one batch'; the checks are equal micro-batches, one" in capsys.readouterr().err
