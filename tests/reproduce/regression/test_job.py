"""Tests of the job of `regression`, a program that measures two revisions of the code.

The job has a process for each revision. It warms up all benchmark cases, then times one case at a
time, and restarts the processes several times. The tests also check what happens if a revision
cannot run a case, and how the job ends.
"""

import contextlib
import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import interleave as interleave_module
from reproduce.regression import job
from reproduce.regression.interleave import Cases, Sampling, fork, interleave
from reproduce.regression.job import Settings, interleaved
from reproduce.regression.timed import Clock
from reproduce.regression.trees import TORCHGPIPE, Tree, Trees

HERE, OTHER = Tree(ROOT, "here", None), Tree(ROOT / "other", "other", None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that takes a script, and lets it replace the program that measures.

    In the script, the variable `job` has the input of the replaced program.
    """

    def be(script: str) -> None:
        package = tmp_path / "reproduce" / "regression"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        begin = "import json, os, sys, time\njob = json.loads(sys.argv[1])\n"
        (package / "interleave.py").write_text(begin + script)
        monkeypatch.setattr(job, "ROOT", tmp_path)

    return be


@pytest.mark.parametrize("cases", [["a", "b"], ["b"]])
def test_a_new_parent_for_every_few_restarts(
    cases: list[str], stand_in: Callable[[str], None]
) -> None:
    """Check that a measuring program ends after a few restarts of its processes, and another
    begins.

    If a revision cannot run a case, the job must report this only once. The programs that begin
    later must leave out the case.
    """
    stand_in("""
for case in list(job["cases"]):
    if case == "b":
        print(json.dumps({"case": "b", "unable": {"base": "gone"}}))
        del job["cases"]["b"]
for i in range(job["first"], job["first"] + job["restarts"]):
    for case in job["cases"]:
        print(json.dumps({"case": case, "restart": i, "parent": os.getpid(), "job": job}))
""")
    clocks: dict[str, Clock] = dict.fromkeys(cases, "cpu")
    how: Any = {"restarts": 12, "rounds": 3, "clock": "wall", "slow_down": 0.5, "seed": 4}
    settings = Settings(clocks, **how)
    parents = 2 if "a" in cases else 0
    restarts = list(range(12)) if "a" in cases else []

    unable, samples = [], []
    for line in interleaved(Trees(OTHER, HERE), settings):
        if "unable" in line:
            unable.append(line["case"])
        if "restart" in line:
            samples.append(line)

    assert unable == ["b"]
    assert [line["restart"] for line in samples] == restarts
    assert len({line["parent"] for line in samples}) == parents
    file = str(TORCHGPIPE.cases)
    ways = {"base": [0, [file, "a", "wall", 0.0]], "head": [1, [file, "a", "wall", 0.5]]}
    for line in samples:
        job = line["job"]
        assert job["folders"] == [str(OTHER.folder), str(HERE.folder)]
        assert job["cases"] == {"a": ways}
        assert job["package"] == "torchgpipe"
        assert job["rounds"] == 3
        assert job["seed"] == 4


def test_a_second_old_version_is_a_third_side(stand_in: Callable[[str], None]) -> None:
    """Check that a third version, which is older than the other two, is measured with them.

    If one of the three versions cannot run a case, the other two must still be compared.
    """
    stand_in("""
if job["first"] == 0:
    print(json.dumps({"case": "a", "unable": {"base": "gone"}}))
    print(json.dumps({"case": "b", "unable": {"base": "gone", "also": "gone"}}))
print(json.dumps({"job": job}))
""")
    settings = Settings({"a": "cpu", "b": "cpu"}, restarts=8)
    third = Tree(ROOT / "third", "third", None)

    *_, first, last = interleaved(Trees(OTHER, HERE, third), settings)

    folders = [str(tree.folder) for tree in (OTHER, HERE, third)]
    assert first["job"]["folders"] == last["job"]["folders"] == folders
    assert list(first["job"]["cases"]["a"]) == ["base", "head", "also"]
    assert list(last["job"]["cases"]) == ["a"]
    assert list(last["job"]["cases"]["a"]) == ["head", "also"]


def test_other_programs_on_the_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([True, False])
    monkeypatch.setattr(interleave_module, "too_busy", lambda shares: next(busy))
    lines = list(run([]))
    assert [(line["case"], line["busy"]) for line in lines] == [("a", True), ("b", False)]


def test_the_load_is_measured_without_the_ends_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the load of a restart is measured only after its processes have started.

    The load of the warm-up is measured apart. If the measurement included the end of the previous
    processes, the CPU time of their children would count as that of other programs.
    """
    log: list[str] = []

    class Noted:
        def begin(self) -> None:
            log.append("begin")

        def round(self) -> dict[str, float]:
            log.append("round")
            return {}

    monkeypatch.setattr(interleave_module, "Load", Noted)
    assert not any(line["busy"] for line in run(log, restarts=2, rounds=1))
    of_load = [line for line in log if not line.startswith(("ask", "answer"))]
    starts, ends = ["start", "start"], ["end", "end"]
    of_restart = [*starts, "begin", "round", "round", "round", *ends]
    assert [line.split()[0] for line in of_load] == of_restart * 2
    warm_up = log[log.index("begin") + 1 : log.index("round")]
    assert len(warm_up) == 8, "a request and an answer of each side, for each of two cases"


def test_a_job_that_breaks_off_says_why(stand_in: Callable[[str], None]) -> None:
    stand_in("print(json.dumps({'case': 'a'}), flush=True)\nsys.exit('too bad\\nit broke')")
    lines = interleaved(Trees(HERE, HERE), Settings({"a": "cpu"}))
    assert next(lines) == {"case": "a"}
    with pytest.raises(Error, match=r"^the measuring job ended with exit code 1: it broke$"):
        next(lines)


def test_it_ends_with_its_forks(stand_in: Callable[[str], None]) -> None:
    """Check that a job that is closed early ends its forked processes, which would run for long."""
    stand_in("""
if os.fork():
    print(json.dumps({"case": "a"}), flush=True)
time.sleep(1000)
""")
    settings = Settings({"a": "cpu"})
    with contextlib.closing(interleaved(Trees(HERE, HERE), settings)) as lines:
        assert next(lines)["case"] == "a"


# Each case has ways to run. A way has the number of its side and the arguments of a request.
TWO: Cases = {
    "a": {"base": (0, ("a",)), "head": (1, ("a",))},
    "b": {"base": (0, ("b",)), "head": (1, ("b",))},
}
THREE: Cases = {"a": {"base": (0, ("a",)), "head": (1, ("a",)), "third": (0, ("c",))}}
GONE = "ImportError: gone"
Texts = dict[tuple[int, str, int], str]
"""Texts that a side sends instead of an answer. The key is the side, the request's argument, and
how often this request came before.
"""


class Fake:
    """A fake connection to a process that measures one revision. No process is started.

    `send` asks the process to run a case, and `recv` returns the answer: the time of the run, or
    `None` if it was the case's first run, the warm-up.

    Args:
        number: The number of the process, which is also the time of each run.
        log: The list to which each call adds a line.
        texts: Texts that `recv` returns in place of some answers. A key has the number of the
            process, the name of the case, and how often the process has answered for this case
            before.
    """

    def __init__(self, number: int, log: list[str], texts: Texts) -> None:
        self.number = number
        self.log = log
        self.texts = texts
        self.asked: list[str] = []
        self.warm: set[str] = set()

    def send(self, asked: tuple[str]) -> None:
        self.asked.append(asked[0])
        self.log.append(f"ask {self.number} {asked[0]}")

    def recv(self) -> float | str | None:
        asked = self.asked.pop(0)
        line = f"answer {self.number} {asked}"
        count = self.log.count(line)
        self.log.append(line)
        answer = float(self.number) if asked in self.warm else None
        self.warm.add(asked)
        return self.texts.get((self.number, asked, count), answer)


def run(
    log: list[str], texts: Texts | None = None, cases: Cases = TWO, **how: int
) -> Iterator[dict[str, Any]]:
    @contextlib.contextmanager
    def start(i: int) -> Iterator[Any]:
        log.append(f"start {i}")
        try:
            yield Fake(i, log, texts or {})
        finally:
            log.append(f"end {i}")

    return interleave(start, cases, Sampling(**{"rounds": 4, **how}))


@pytest.mark.parametrize("cases", [TWO, THREE], ids=["two", "three"])
def test_all_are_warm_before_any_sample_and_are_asked_one_at_a_time(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that all cases are warmed up before the first is timed, and run one at a time."""
    expected = []
    for restart in (5, 6):
        for case, ways in cases.items():
            samples = {way: [float(side)] * 4 for way, (side, _) in ways.items()}
            expected.append({"case": case, "restart": restart, "samples": samples, "busy": False})
    asks, answers = [], []
    for ways in cases.values():
        for side, (argument,) in ways.values():
            asks.append(f"ask {side} {argument}")
            answers.append(f"answer {side} {argument}")

    log: list[str] = []
    monkeypatch.setattr(interleave_module, "too_busy", lambda shares: False)
    lines = list(run(log, cases=cases, restarts=2, first=5))

    assert lines == expected
    first_restart = log[: len(log) // 2]
    starts, inner, ends = first_restart[:2], first_restart[2:-2], first_restart[-2:]
    assert sorted(starts) == ["start 0", "start 1"]
    assert sorted(ends) == ["end 0", "end 1"]
    warm = 2 * len(asks)
    assert sorted(inner[:warm]) == sorted(asks + answers)
    timed = inner[warm:]
    asked, answered = timed[::2], timed[1::2]
    assert answered == [line.replace("ask", "answer") for line in asked]
    assert Counter(asked) == dict.fromkeys(asks, 4)


@pytest.mark.parametrize(
    "place", [0, 2, 6, 10, 14], ids=["start", "warm-up a", "warm-up b", "case a", "case b"]
)
def test_who_comes_first_is_drawn_for_each_restart(place: int) -> None:
    log: list[str] = []
    list(run(log, restarts=40, rounds=1))
    lines_of_a_restart = len(log) // 40
    firsts = [line.split()[1] for line in log[place::lines_of_a_restart]]
    assert len(firsts) == 40
    assert 10 <= firsts.count("0") <= 30


@pytest.mark.parametrize(
    ("cases", "side", "asked", "least", "left"),
    [
        (TWO, 0, "a", 2, {"b": ["base", "head"]}),
        (TWO, 0, "a", 1, {"a": ["head"], "b": ["base", "head"]}),
        (THREE, 1, "a", 2, {"a": ["base", "third"]}),
    ],
)
def test_what_cannot_run_is_told_once_and_left_out(
    cases: Cases, side: int, asked: str, least: int, left: Any
) -> None:
    (name,) = [name for name, way in cases["a"].items() if way == (side, (asked,))]
    log: list[str] = []

    first, *lines = run(log, {(side, asked, 0): GONE}, cases, restarts=2, least=least)

    assert first == {"case": "a", "unable": {name: GONE}}
    found = [(line["case"], list(line["samples"])) for line in lines]
    assert found == 2 * list(left.items())
    assert log.count(f"ask {side} {asked}") == 1


@pytest.mark.parametrize(
    ("answer", "first", "finished"),
    [(1, 0, []), (5, 0, ["a", "b"]), (0, 5, [])],
    ids=["a sample", "the warm-up of a later restart", "the first restart of a later process"],
)
def test_what_ran_before_and_no_longer_does_is_an_error(
    answer: int, first: int, finished: list[str]
) -> None:
    """Check the error if a case ran before and no longer runs, for example for lack of memory."""
    log: list[str] = []
    lines = run(log, {(1, "a", answer): "MemoryError"}, restarts=3, first=first)
    for case in finished:
        assert next(lines)["case"] == case
    with pytest.raises(Error, match="a ran before, and no longer does in head: MemoryError"):
        next(lines)
    assert sorted(log[-2:]) == ["end 0", "end 1"]


def test_a_process_refuses_a_torchgpipe_of_another_folder(tmp_path: Path) -> None:
    """Check the error of a process that imports torchgpipe from a wrong folder.

    Without this error, the process would measure the wrong version.
    """
    with fork(tmp_path, "torchgpipe", "reproduce.regression.timed:Timed") as side:
        side.send((str(TORCHGPIPE.cases), "machinery never", "cpu", 0.0))
        answer = side.recv()
        assert answer.startswith("ImportError: torchgpipe comes from ")
        assert not side.poll()


@pytest.mark.parametrize(
    "ask", [lambda side: side.send("a"), lambda side: side.recv()], ids=["asked", "to answer"]
)
def test_a_process_that_ended_by_itself(
    ask: Callable[[Connection], object], tmp_path: Path
) -> None:
    def buffers() -> int:
        return sum(type(each) is memoryview for each in gc.get_objects())

    gc.collect()
    before, others = buffers(), set(multiprocessing.active_children())
    with (
        pytest.raises(Error, match="a measuring process ended by itself") as caught,
        fork(tmp_path, "", "") as side,
    ):
        (process,) = set(multiprocessing.active_children()) - others
        process.kill()
        process.join()
        ask(side)
    # The error can live long, and its frames must not keep the data that was not sent.
    assert buffers() <= before, caught


def test_packages_may_be_in_the_folders_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a checkout comes before the folders of PYTHONPATH.

    So the packages of the checkout are measured, and other packages may come from these folders.
    """
    (tmp_path / "told.py").write_text(
        "import json, reproduce; print(json.dumps({'path': [*reproduce.__path__]}))"
    )
    (tmp_path / "reproduce").mkdir()
    (tmp_path / "reproduce" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(job.in_turn({}, {}, "told")) == [{"path": [str(ROOT / "reproduce")]}]
