"""Test the GPU benchmark that emulates the speed tables of papers, and its summary of a run."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu import emulated
from benchmarks.gpu.experiments import about_rows, run_experiment, summary
from benchmarks.gpu.part import Context
from reproduce.records.record import Record, save

from ...reproduce.made import emulated as as_emulated
from ...reproduce.made import ran, record
from ...reproduce.made import row as made_row


def context(tmp_path: Path, seconds: float = 60.0) -> Context:
    folder = tmp_path / "part"
    folder.mkdir()
    return Context("part", "tiny", folder, time.monotonic() + seconds)


def test_the_record_of_an_experiment_is_summed_up() -> None:
    """Check the summary of a recorded run of an experiment.

    For each row (configuration), the summary has the emulated samples/s, the samples/s if one
    thread issues all tasks, and the published samples/s. For a failed row, it has the reason.
    """
    results = ran("amoebanet-speed", "paper", lambda row: [100.0] * 3, "cuda", emulated=True)
    first, second, *_ = results
    slow = {"one_thread_time": first.config["batch_size"] / 25.0}
    results[0] = replace(first, values=slow)
    same = {"one_thread_time": second.config["batch_size"] / 99.0}
    results[1] = replace(second, values=same)
    lost = made_row("lost", status="out of memory", emulated=True, reason="too large")
    measured = made_row("here", 1.0)

    rows = summary(record(*results, lost, measured), emulated=True)

    assert rows["n2m1"]["speed"] == pytest.approx(100.0)
    assert rows["n2m1"]["one_thread"] == pytest.approx(25.0)
    assert rows["n8m32"]["published"] == pytest.approx(132.4, abs=0.1)
    assert rows["lost"] == {"status": "out of memory", "reason": "too large"}
    assert "published" not in rows["naive n2"]
    assert "here" not in rows
    rows["n8m32"]["predicted"] = 140.0
    text = about_rows(rows)
    assert text.startswith(f"{len(results)} of {len(results) + 1} rows; n8m32 100 samples/s, ")
    assert "published 132, predicted 140" in text
    assert "would slow down 1 of 2 rows, n2m1 to 25% of its speed" in text
    assert "one thread" not in about_rows({"n8m32": rows["n8m32"]})


def test_a_run_that_takes_too_long_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the benchmark stops a run (by SIGINT) that takes longer than its allotted time.

    The benchmark then uses the results that the run has written before.
    """
    given = context(tmp_path)
    folder = tmp_path / "records"
    folder.mkdir()
    save(record(made_row("x", 1.0)), folder / "older.json")
    started: list[Any] = []
    start = subprocess.Popen

    def sleep(command: list[str], **options: Any) -> Any:
        started.append(command)
        save(replace(record(made_row("x", 1.0)), name="new"), folder / "new.json")
        program = "import time; time.sleep(600)"
        started.append(start([sys.executable, "-c", program], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", sleep)
    found = run_experiment(given, "e", ["--steps", "1"], 0.2)

    command, process = started
    assert command[1:5] == ["-m", "reproduce", "run", "e"]
    assert command[-2:] == ["--steps", "1"]
    assert process.returncode == -signal.SIGINT
    assert isinstance(found, Record)
    assert found.name == "new"


@pytest.mark.parametrize("written", [False, True])
def test_a_run_without_a_row_says_so(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check what is said of a run that dies early. It writes its record before its first row."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    if written:
        start = subprocess.Popen

        def begin(command: list[str], **options: Any) -> Any:
            save(record(), tmp_path / "records" / "new.json")
            return start(command, **options)

        monkeypatch.setattr(subprocess, "Popen", begin)
    found = run_experiment(context(tmp_path), "amoebanet-speed", [], 5.0)
    assert found == "its run ended with code 1 before its first round; see its log"


def test_experiments_without_time_are_named(tmp_path: Path) -> None:
    result = emulated.run(Context("part", "paper", tmp_path, time.monotonic()))
    names = ("amoebanet-speed", "unet-speed", "resnet101-speed")
    assert emulated.lines(result) == [f"{name}: no time was left for it" for name in names]


def test_each_experiment_gets_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check how the benchmark divides its time among experiments.

    The time that an experiment leaves unused goes to the later ones. The test also checks that the
    results of an experiment are shown beside predictions.
    """
    given = Context("part", "paper", tmp_path / "part", time.monotonic() + 305.0)
    given.folder.mkdir()
    asked: dict[str, float] = {}
    results = [as_emulated(each) for each in ran("unet-speed", "paper", lambda row: [1.0], "cuda")]

    def run(context: Context, name: str, options: Any, seconds: float) -> Any:
        asked[name] = seconds
        assert "--devices" in options
        return record(*results, device="cuda") if name == "unet-speed" else "it ended"

    monkeypatch.setattr(emulated, "run_experiment", run)
    monkeypatch.setattr(emulated, "own_links", lambda devices: "h100x8")
    twice = ran("unet-speed", "paper", lambda row: [2.0], "meta")
    monkeypatch.setattr(emulated, "predict_run", lambda run, hardware: record(*twice))

    result = emulated.run(given)

    assert asked == {
        "amoebanet-speed": pytest.approx(100, abs=5),
        "unet-speed": pytest.approx(150, abs=5),
        "resnet101-speed": pytest.approx(300, abs=5),
    }
    assert [*result["tables"]] == ["unet-speed"]
    assert emulated.lines(result) == [
        "unet-speed: 27 of 27 rows; pipeline-8 1 samples/s, published 88, predicted 2",
        "amoebanet-speed: it ended",
        "resnet101-speed: it ended",
    ]
