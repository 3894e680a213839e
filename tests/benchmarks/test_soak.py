"""The soak: what it finds, its log, and half a minute of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.child import ROOT
from benchmarks.harness import start
from benchmarks.soak_checks import ended_otherwise, lost_steps, wrong_numbers
from benchmarks.soak_plan import Attempt, Fault, draw_episode
from benchmarks.soak_reports import Line, Lines
from reproduce.error import Error
from reproduce.records.record import load

STATE = {"0.weight": "a", "0.weight exp_avg": "b"}


def step(number: int, **more: Any) -> Line:
    return {"what": "step", "step": number, "losses": ["x"], "norm": "y", "output": None, "state": STATE, **more}


def told(*lines: Line) -> Lines:
    found = Lines(Path())
    found.all = list(lines)
    return found


NAMED = "RankFailed: rank 1 failed"
WRONG: list[tuple[str, list[Line], list[Line], str]] = [
    ("nothing", [step(0), step(1)], [step(0), step(1)], ""),
    ("a loss", [step(0, losses=["z"])], [step(0)], "attempt 0, rank 0, step 0: losses ['z'], not ['x']"),
    ("a norm", [step(0)], [step(0), step(1, norm="z")], "attempt 0, rank 1, step 1: norm z, not y"),
    ("a parameter", [step(0, state={"0.weight": "z"})], [step(0)], "attempt 0, rank 0, step 0: 0.weight"),
    ("one on no rank", [step(0, state={})], [step(0, state={"0.weight": "a"})], "no rank has 0.weight exp_avg"),
    ("what was loaded", [step(0, what="loaded", state={"0.weight": "z"})], [], "attempt 0, rank 0, loaded 0: 0.weight"),
]


@pytest.mark.parametrize("first, second, said", [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_numbers_are_found(first: list[Line], second: list[Line], said: str) -> None:
    wrong, compared = wrong_numbers(told(step(0), step(1)), [{0: told(*first), 1: told(*second)}])
    assert compared and (said in wrong[0] if said else not wrong)


def end(error: str) -> Line:
    return {"what": "ended", "at": 2.0, "error": error}


FAULT: Line = {"what": "fault", "at": 1.0}
OWN = end("ArithmeticError: a fault in forward")
ENDS: list[tuple[str, bool, list[Line], list[Line], str]] = [
    ("as it should", True, [end(NAMED)], [FAULT, OWN], ""),
    ("having nothing more to do", True, [end("")], [FAULT, OWN], ""),
    ("without a fault", True, [end("")], [end("")], "attempt 0, rank 1: the fault in forward did not spring"),
    ("without a word", True, [], [FAULT, OWN], "attempt 0, rank 0: its process ended without an error"),
    ("naming another", True, [end("RankFailed: rank 2 failed")], [FAULT, OWN], "does not name rank 1: RankFailed: r"),
    ("with another's error", True, [end(NAMED)], [FAULT, end("RankFailed")], "does not raise its own error, but Rank"),
    ("well", False, [end("")], [end("")], ""),
    ("for nothing", False, [end(NAMED)], [end("")], "attempt 0, rank 0: ended without a fault: RankFailed: rank 1"),
]


@pytest.mark.parametrize("faulty, first, second, said", [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_ranks_that_end_otherwise_are_found(faulty: bool, first: list[Line], second: list[Line], said: str) -> None:
    fault = Fault("raising", "forward", step=0, rank=1, share=0.0, skipped=0) if faulty else None
    episode = draw_episode(1, 1, 3.0)._replace(home="kept processes", attempts=(Attempt((1, 1), fault),))
    wrong = ended_otherwise(episode, [{0: told(*first), 1: told(*second)}])
    assert said in wrong[0] if said else not wrong


def saved(number: int) -> Line:
    return {"what": "saved", "step": number}


def loaded(number: int) -> Line:
    return step(number, what="loaded")


LOST: list[tuple[str, list[list[Line]], list[list[Line]], str]] = [
    ("none", [[saved(0)], [saved(0)]], [[loaded(0), step(1)], [loaded(0), step(1)]], ""),
    ("one that not all had saved", [[saved(0)], []], [[loaded(-1), step(1)], [loaded(-1), step(1)]], ""),
    ("saved", [[saved(0)], [saved(0)]], [[loaded(-1)], [loaded(-1)]], "attempt 1: went on from steps [-1], but step 0"),
    ("on a rank", [[], []], [[loaded(0)], [loaded(-1)]], "attempt 1: went on from steps [-1, 0]"),
    ("the last", [[], []], [[loaded(0), step(1)], [loaded(0)]], "the last attempt came to steps [0, 1], not 1"),
]


@pytest.mark.parametrize("first, second, said", [case[1:] for case in LOST], ids=[case[0] for case in LOST])
def test_steps_that_are_lost_are_found(first: list[list[Line]], second: list[list[Line]], said: str) -> None:
    episode = draw_episode(1, 1, 3.0)
    episode = episode._replace(steps=episode.steps[:2])
    attempts = [{rank: told(*lines) for rank, lines in enumerate(attempt)} for attempt in (first, second)]
    wrong = lost_steps(episode, attempts)
    assert said in wrong[0] if said else not wrong


def test_the_log_goes_on_as_it_began(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"

    def log(seed: int) -> soak.Log:
        options = soak.parser().parse_args(["--seed", str(seed), "--json", str(path)])
        return soak.Log(path, start(options, "soak", "random faults", {}, devices=4))

    log(1).add({"episode": 1, "again": False, "seconds": 2.0})
    with path.with_suffix(".jsonl").open("a") as file:
        file.write('{"episode": 2, "aga')
    again = log(1)
    assert (again.next, again.seconds, len(again.lines)) == (2, 2.0, 1)
    again.add({"episode": 2, "again": True, "seconds": 3.0})
    assert (log(1).next, log(1).seconds) == (2, 5.0)
    with pytest.raises(Error, match=r"soak\.jsonl was begun with the seed 1, not 2"):
        log(2)


@pytest.mark.slow
def test_half_a_minute_of_it(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--seed", "1", "--json", str(path)]
    log = path.with_suffix(".jsonl")
    killed = subprocess.Popen(command, cwd=ROOT)
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = load(path)
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert [line["episode"] for line in lines if not line["again"]] == [*range(1, 1 + len(lines))]
    values = record.results[0].values
    assert values["wrong values"] == values["hangs"] == values["episodes with another error"] == 0
    assert values["values compared"] and soak.table(record)
