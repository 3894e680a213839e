"""Tests of the estimate of how long a run will take, and of how its progress is counted.

The estimate comes from earlier runs. Without earlier runs, a first step is timed.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices, find_devices
from reproduce.machine.load import Load
from reproduce.records.record import Record, Result, Run, save
from reproduce.run.emulation import shortened
from reproduce.run.estimate import StepTimes, earlier_runs
from reproduce.run.training import Balancer

from ..made import RUN
from .conftest import ROWS, Fake

(ROW,) = [row for row in ROWS if row.name == "n2m4"]
SECONDS = 3.0  # of a step by the first timing


def result_of(row: Row, **fields: Any) -> Result:
    result = Result("tiny-speed", row.name, "measured", scale="small", config=row.config())
    return msgspec.structs.replace(result, **fields)


def record_of(name: str, *results: Result, run: Run = RUN) -> Record:
    return Record(name, "", "measured", {}, list(results), scale="small", run=run)


class Timed:
    """A fake training. Each step advances a fake clock by the constant `SECONDS`."""

    clock: ClassVar[float] = 0.0
    rows: ClassVar[list[Row]] = []
    error: ClassVar[Exception | None] = None

    def __init__(self, row: Row, *_: object) -> None:
        self.rows.append(row)
        if self.error is not None:
            raise self.error

    def step(self) -> None:
        assert torch.get_num_threads() == 1, "as when a row is emulated"
        Timed.clock += SECONDS


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepTimes]:
    """Return a function that makes a `StepTimes`, which estimates the times of steps.

    If a `StepTimes` has to time a first step, it runs a fake training and reads a fake clock.
    """
    clock = SimpleNamespace(perf_counter=lambda: Timed.clock)
    monkeypatch.setattr("reproduce.run.estimate.time", clock)
    monkeypatch.setattr("reproduce.run.estimate.Training", Timed)
    monkeypatch.setattr(Timed, "rows", [])
    monkeypatch.setattr(Timed, "error", None)

    def make(*earlier: Record, devices: Devices | None = None) -> StepTimes:
        found = devices or find_devices("cpu", 1)
        return StepTimes(found, Balancer(find_devices("cpu", 1)), 0, earlier)

    return make


def test_a_first_timing_is_scaled_by_the_work(times: Callable[..., StepTimes]) -> None:
    found = times()
    guess = found.guess(result_of(ROW), ROW, 2 * ROW.work())
    again = found.guess(result_of(ROW), ROW, 1.0)

    (timed,) = Timed.rows
    assert timed.partitions is None
    assert timed.batch_size == ROW.micro_batch_size
    assert guess == pytest.approx(SECONDS * 2 * ROW.work() / timed.work())
    assert again == pytest.approx(SECONDS / timed.work()), "a model is timed once"
    assert found.sources == ["a first timing of each model"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), None])
def test_nothing_is_known_without_a_timing(
    times: Callable[..., StepTimes], error: Exception | None
) -> None:
    """Check that the time of a step is unknown if no step can be timed.

    A step cannot be timed if it raises an error, or if the devices are `meta` devices, which
    compute nothing.
    """
    Timed.error = error
    devices = find_devices("meta" if error is None else "cpu", 1)
    found = times(devices=devices)
    assert found.guess(result_of(ROW), ROW, 1.0) is None
    assert found.sources == []


def test_the_newest_steps_of_a_row_count(times: Callable[..., StepTimes]) -> None:
    executed = {"executed": shortened(ROW).micro_batches}
    newest = result_of(ROW, samples={"step_time": [1.0, 7.0, 9.0]})
    emulated = {"status": "emulated", "emulated": True, "values": executed}
    slow = {"step_time": [8.0], "work_time": [4.0]}
    older = [
        result_of(ROW, samples={"step_time": [2.0]}),
        result_of(ROW, samples=slow, **emulated),
    ]
    found = times(record_of("new", newest), record_of("old", *older))

    profiled = replace(ROW, balance=(4, 5))
    assert found.guess(result_of(profiled), profiled, 1.0) == 7.0, "balances are profiled"
    assert found.guess(result_of(ROW, emulated=True), ROW, 1.0) == 4.0, "it runs as long"
    assert found.sources == ["the steps of new", "the steps of old"]
    other = replace(ROW, name="other")
    assert found.guess(result_of(other), other, 0.5) == 3.5, "by the work of rows with its model"
    assert not Timed.rows


def timed_work() -> float:
    """Return the work (amount of computation) of the step that is timed to estimate `ROW`.

    This step has a single micro-batch and no recomputation.
    """
    samples = ROW.micro_batch_size
    assert samples is not None
    return replace(ROW, batch_size=samples, checkpoint=None).work()


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": {}},
        {"config": {**ROW.config(), "batch_size": 1}},
        {"samples": {"step_time": [1.0], "others": [0.5]}},
        {"emulated": True, "status": "emulated", "values": {"executed": 3}},
        {"scale": "paper"},
        {"engine": "ranks"},
    ],
)
def test_other_steps_do_not_count(times: Callable[..., StepTimes], changes: dict[str, Any]) -> None:
    """Check that some steps of earlier runs are not used to estimate the time of a row.

    Steps are not used if other programs disturbed them, or if they have another configuration.
    """
    before = result_of(ROW, **{"samples": {"step_time": [1.0]}, **changes})
    emulated = before.emulated
    found = times(record_of("before", before))
    guess = found.guess(result_of(ROW, emulated=emulated), ROW, timed_work())
    assert guess == pytest.approx(SECONDS)


def test_only_runs_on_the_same_machine_and_devices_count(tmp_path: Path) -> None:
    change = msgspec.structs.replace
    runs = {
        "a-older": change(RUN, started="2020-01-01T00:00:00Z"),
        "b-newer": change(RUN, started="2020-01-02T00:00:00Z"),
        "c-devices": change(RUN, devices=RUN.devices + 1),
        "d-machine": change(RUN, machine=change(RUN.machine, cpu="other")),
    }
    for name, run in runs.items():
        save(record_of(name, run=run), tmp_path / f"{name}.json")
    save(change(record_of("none"), run=None), tmp_path / "none.json")
    found = [record.name for record in earlier_runs(tmp_path, RUN)]
    assert found == ["b-newer", "a-older"]


def test_a_run_says_before_it_starts_how_long_it_takes(fake: type[Fake], run: Any) -> None:
    run("tiny-speed", "--steps=3")
    lines = run.said.splitlines()
    (number,) = [k for k, line in enumerate(lines) if line.startswith("it takes about ")]
    assert lines[number] == "it takes about 0 s, by a first timing of each model"
    assert lines[number + 1].startswith("running tiny-speed: ")

    run("tiny-speed", "--steps=3")
    assert "by the steps of tiny-speed-small-2" in run.said


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a line at each step."""
    monkeypatch.setattr("reproduce.run.progress.SECONDS_BETWEEN_LINES", 0.0)


def counted(said: str, phase: str) -> list[str]:
    return re.findall(rf"left: ({phase}.*? row \d+ of \d+): ", said)


@pytest.mark.usefixtures("every_line")
def test_rounds_and_rows_are_counted(fake: type[Fake], run: Any) -> None:
    rows = tuple(row for row in ROWS if row.equal == "batch")
    emulated = len(rows)
    count = emulated + sum(row.devices <= 2 for row in rows)

    run("tiny-speed", "--steps=2", rows=rows)

    expected = []
    for k in (1, 2):
        expected += [f"round {k} of 2, row {i} of {count}" for i in range(1, count + 1)]
    assert counted(run.said, "round") == expected
    built = counted(run.said, "building")
    assert built[0] == f"building, row 1 of {emulated}"
    assert built[-1] == f"building, row {count - emulated} of {count - emulated}"


@pytest.mark.usefixtures("every_line")
def test_rounds_that_are_run_again_are_counted(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [0.0, 0.2, 0.0, 0.0]
    monkeypatch.setattr(Load, "begin", lambda self: setattr(self, "left", iter(busy)))
    monkeypatch.setattr(Load, "round", lambda self: {"others": next(self.left, 0.0)})
    rows = tuple(row for row in ROWS if row.name == "naive n8")

    run("tiny-speed", "--steps=3", rows=rows)

    assert counted(run.said, "round") == [
        "round 1 of 3, row 1 of 1",
        "round 2 of 3, row 1 of 1",
        "round 3 of 4 (1 disturbed), row 1 of 1",
        "round 4 of 4 (1 disturbed), row 1 of 1",
    ]


@pytest.mark.usefixtures("every_line")
def test_a_time_limit_bounds_the_rounds_that_are_counted(fake: type[Fake], run: Any) -> None:
    rows = tuple(row for row in ROWS if row.name == "naive n8")
    limit = {"steps": 9, "least_steps": 4, "seconds": 1e-9}

    run("tiny-speed", rows=rows, **limit)

    assert counted(run.said, "round") == [f"round {k} of 4, row 1 of 1" for k in (1, 2, 3, 4)]
