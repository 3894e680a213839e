"""run: a record and tables of what was measured, whatever ends the run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from reproduce.cli.main import main
from reproduce.cli.run import INTERRUPTED
from reproduce.experiments import Experiment
from reproduce.machine.devices import Devices
from reproduce.records.record import Record, load
from reproduce.tables.layout import WIDTH

Tiny = Mapping[str, Experiment]
SCRIPT = str(Path(__file__).parents[1] / "tiny.py")
SMALL = ("--on", "cpu", "--scale", "small")
PATIENCE = 300  # seconds; only a hang takes as long


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)


def the_record(folder: str = "out") -> Record:
    (path,) = Path(folder).glob("*.json")
    return load(path)


def test_from_end_to_end(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny-speed", "tiny-memory", *SMALL, "--steps", "2", "--out", "new/folder"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= WIDTH
    for said in ("at equal batch size", "how busy the devices", "the published models", "measured peak, live bytes"):
        assert said in " ".join(out.split())
    assert "1,844,858,344" in out and "needs 8 devices" in out
    assert err.startswith("scale small on 2 CPU devices of 1 thread")

    record_path, tables_path = sorted(Path("new/folder").iterdir())
    assert record_path.stem == tables_path.stem and record_path.stem.startswith("tiny-speed_tiny-memory-small-2")
    record, page = load(record_path), tables_path.read_text()
    assert record.run is not None and record.run.state == "finished" and record.run.ended is not None
    assert record.run.command[:3] == ["python", "-m", "reproduce"]
    assert record.run.settings["freed_memory"] in ("kept", "as the C library does")
    assert f"freed memory: {record.run.settings['freed_memory']}" in page
    assert record.run.settings["steps"] == 2 and record.run.settings["tiny-speed"]["warmup"] == 0
    found = {result.row: result for result in record.results if result.scale == "small"}
    for name in ("naive n2", "checkpoint-only m1", "checkpoint-only m4", "GPipe n2m1", "GPipe n2m4"):
        times = found[name].samples["step_time"]
        assert len(times) == 2 and min(times) > 0
    assert sum(found["naive n2"].config["balance"]) == 3 + 6
    peaks = found["pipeline-2"].values
    assert len(peaks["peak_allocated"]) == 2 and sum(peaks["peak_allocated"]) > peaks["model_bytes"] > 0
    assert page.count("\n## ") == 4 and "## AmoebaNet-D: speed" in page

    assert main(["show", str(record_path)]) == 0
    assert capsys.readouterr().out.strip() in out
    assert main(["show", "--markdown", str(record_path)]) == 0
    assert capsys.readouterr().out == page


def test_rows_and_their_traces(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = ("--row", "dep-str-ptl n2", "--row", "baseline n2")
    assert main(["run", "tiny-ablation", *SMALL, *rows, "--steps", "1", "--out", "out", "--trace", "t.png"]) == 0
    written = [f"t-{row}.{kind}" for row in ("baseline-n2", "dep-str-ptl-n2") for kind in ("json", "png")]
    assert sorted(path.name for path in Path().glob("t-*")) == written
    assert capsys.readouterr().out.splitlines()[-4:] == written

    record = the_record()
    assert [result.row for result in record.results] == ["baseline n2", "dep-str-ptl n2"]
    assert record.run is not None and record.run.settings["rows"] == ["dep-str-ptl n2", "baseline n2"]
    for result in record.results:
        assert len(result.values["utilization"]) == 2 and 0 < sum(result.values["utilization"]) <= 2
        assert 0 <= result.values["bubble"] < 1
        events = json.loads(Path(f"t-{result.row.replace(' ', '-')}.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" and event["cat"] == "forward" for event in events) == 2 * 8


def test_a_trace_that_cannot_be_written_ends_no_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reproduce.cli.run.matplotlib_problem", lambda: "no picture")
    Path("t.json").mkdir()
    row = ("--row", "naive n2", "--steps", "1")
    assert main(["run", "tiny-speed", *SMALL, *row, "--out", "out", "--trace", "t"]) == 1
    out, err = capsys.readouterr()
    assert "at equal batch size" in " ".join(out.split())
    assert "no picture" in err and err.splitlines()[-1].startswith("reproduce: --trace: ")
    assert the_record().results[0].status == "measured"


def test_a_failed_row_is_told_at_the_end(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("reproduce.run.session.Training", fail)
    assert main(["run", "tiny-speed", *SMALL, "--out", "out"]) == 1
    out, err = capsys.readouterr()
    said = "reproduce: 5 rows failed, the first being naive n2: ValueError: no such luck"
    assert "failed" in out and err.splitlines()[-1].startswith(said)


@pytest.mark.parametrize("devices", [Devices("cuda", 1), Devices("cuda", 2), Devices("cpu", 1, 2)], ids=str)
def test_advice_to_who_has_one_gpu(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reproduce.cli.run.cores", lambda: 2)
    said = one_gpu_advice(devices) or ""
    assert ("--on cpu runs pipelines on the CPU's 2 cores, at scale small" in said) == (devices == Devices("cuda", 1))


def wait_for(process: subprocess.Popen[str], arrived: Callable[[Record], bool]) -> None:
    """Wait until the record is there, and what it has to hold has arrived."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if list(Path("out").glob("*.json")) and arrived(the_record()):
            return
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_finished(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start(
        SCRIPT, "run", "tiny-speed", *SMALL, "--steps", "999", "--out", str(tmp_path / "out"), TINY_SLEEP="0.05"
    )
    wait_for(process, lambda record: any(len(row.samples.get("step_time", [])) > 1 for row in record.results))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (INTERRUPTED, "") and "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted; 5 measured rows kept in ")

    record = the_record()
    assert record.run is not None and record.run.state == "interrupted"
    measured = [result for result in record.results if result.status == "measured"]
    assert len(measured) == 5 and all(len(result.samples["step_time"]) >= 2 for result in measured)
    _, tables = sorted(Path("out").iterdir())
    assert "interrupted: 2" in tables.read_text(), "and no half-written file is left behind"


def test_a_kill_leaves_a_record_that_can_be_read(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start(SCRIPT, "run", "tiny-memory", *SMALL, "--out", str(tmp_path / "out"), TINY_SLEEP="60")
    wait_for(process, lambda record: True)
    process.kill()
    process.communicate(timeout=PATIENCE)
    run = the_record().run
    assert run is not None and run.state == "running"


@pytest.mark.slow
def test_only_torch_click_msgspec_and_tabulate_are_needed(
    start: Callable[..., Any], broken_modules: Callable[..., Path], tmp_path: Path
) -> None:
    others = ("torchvision", "pynvml", "jinja2", "matplotlib", "scipy", "pytest")
    folder = broken_modules(**{name: f"raise ImportError('{name} is not needed')" for name in others})
    command = ["run", "tiny-speed", *SMALL, "--steps", "1", "--out", str(tmp_path / "out")]
    process = start(SCRIPT, *command, first=folder)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert {result.status for result in the_record().results} == {"measured", "needs devices"}
