"""Tests of the command `run`, which runs experiments.

The command must write a record and tables even if an error ends the run.
"""

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from reproduce.experiments.row import Experiment, Row
from reproduce.records.record import Record, Result, Run, load
from reproduce.tables.layout import WIDTH
from torchgpipe.tensors.observe import Kind

from ..made import one_line
from ..tiny import Words

Tiny = Mapping[str, Experiment]
SCRIPT = str(Path(__file__).parents[1] / "tiny.py")
SMALL = ("--on", "cpu", "--scale", "small")
PATIENCE = 300  # seconds; only a test that hangs takes as long
TASKS = get_args(Kind)[:3]
pytestmark = pytest.mark.usefixtures("here")


def the_record(folder: str = "out") -> Record:
    (path,) = Path(folder).glob("*.json")
    return load(path)


ROWS = ("n2m1", "n8m4", "n8m4/pb", "naive n2", "GPipe n2m4", "baseline", "pipeline-8")
TITLES = [
    "like the published rows",
    "published balance is worth",
    "at equal batch size",
    "live bytes",
]


def order_in(trace: Path) -> list[tuple[int, str, int]]:
    """Return the tasks in a trace file, ordered by device and start time.

    Each task is a tuple of its device, its kind (such as "forward") and its micro-batch.
    """
    whole = json.loads(trace.read_text())
    (seconds,) = whole["otherData"]["step_seconds"]
    step = 1e6 * seconds + 0.001  # microseconds, and a possible rounding error
    tasks = []
    for event in whole["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in TASKS:
            begin = event["ts"]
            end = begin + event["dur"]
            assert 0 <= begin < end <= step
            tasks.append((event["tid"], begin, event["cat"], event["args"]["micro-batch"]))
    tasks.sort(key=lambda task: task[:2])
    return [(device, kind, micro_batch) for device, _, kind, micro_batch in tasks]


def check_timed(row: Row, result: Result) -> None:
    steps, values = result.samples["step_time"], result.values
    assert len(steps) == 2
    assert min(steps) > 0
    assert len(values["utilization"]) == row.devices
    assert 0 < sum(values["utilization"]) <= row.devices
    assert sum(result.config["balance"]) == 3 + 6
    assert 0 <= values["bubble"] < 1


def check_run(run: Run | None, page: str) -> None:
    assert run is not None
    assert run.state == "finished"
    assert run.ended is not None
    assert run.command[:3] == ["python", "-m", "reproduce"]
    kept = "the C library kept freed memory" in page
    assert run.settings["freed_memory"] == ("kept" if kept else "as the C library does")
    assert run.settings["steps"] == 2
    assert run.settings["emulate"] == 8


def test_from_end_to_end(tiny: Tiny, command: Any) -> None:
    """Run some rows (configurations) of two experiments, and check all that `run` writes.

    The command writes a record, a page in Markdown, and a trace of each measured and each emulated
    row.
    """
    folder = Path("new/folder")
    options = ["--steps", "2", "--out", str(folder), "--trace", "t.png"]
    for name in ROWS:
        options += ["--row", name]

    out, err = command("run", "tiny-speed", "tiny-memory", *SMALL, *options)

    assert max(map(len, out.splitlines())) <= WIDTH
    flat = one_line(out)
    assert sorted(TITLES, key=flat.index) == TITLES, "a group's table follows when it is done"
    assert "1,844,858,344" in out
    assert err.startswith("scale small on 2 CPU devices of 1 thread")

    record_path, page_path = sorted(folder.iterdir())
    assert record_path.stem == page_path.stem
    assert record_path.stem.startswith("tiny-speed_tiny-memory-small-2")
    record, page = load(record_path), page_path.read_text()
    check_run(record.run, page)
    found = {}
    for result in record.results:
        if result.scale == "small":
            found[result.row, result.emulated] = result
    written = {str(record_path), str(page_path)}
    for row in tiny["tiny-speed"].scale("small").rows:
        if row.name not in ROWS:
            continue
        name = row.name.replace(" ", "-").replace("/", "-")
        emulated = Path(f"t-{name}-emulated.json")
        traces = [emulated]
        check_timed(row, found[row.name, True])
        order = order_in(emulated)
        forwards = [kind for _, kind, _ in order if kind == "forward"]
        assert len(forwards) == (row.chunks or 1) * row.devices
        if row.devices < 8:
            measured = Path(f"t-{name}.json")
            traces.append(measured)
            check_timed(row, found[row.name, False])
            assert order_in(measured) == order, "emulated as in a real run"
        for trace in traces:
            written |= {str(trace), str(trace.with_suffix(".png"))}
    values = found["pipeline-8", False].values
    assert len(values["peak_allocated"]) == 8
    assert sum(values["peak_allocated"]) > values["model_bytes"] > 0
    assert page.count("\n## ") == 6, "tables of the run, and one of how busy the devices were"

    shown, _ = command("show", str(record_path))
    assert set(out.splitlines()) <= set(shown.splitlines()), "nothing but tables"
    files = {*Path().glob("*.*"), *folder.glob("*.*")}
    assert set(map(str, files)) == written
    last = err.splitlines()[-len(written) - 1 :]
    assert last[0] == "written:"
    assert set(last[1:]) == written
    shown, _ = command("show", "--format", "markdown", str(record_path))
    assert shown == page


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_words_from_end_to_end(
    tiny: Tiny, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run a language model, which must be traced because it is not an `nn.Sequential`.

    With every engine, the recorded loss must be the loss of the module without a pipeline.
    """
    options = "--engine threads --engine ranks --steps 1 --out runs"
    command("run", "tiny-words", *SMALL, *options.split())

    row = tiny["tiny-words"].scale("small").rows[0]
    torch.manual_seed(0)
    module = Words(8, 11)
    input, target = row.sized.batch(4)
    loss = row.criterion(module(**input), target).item()
    losses = [each.samples["loss"] for each in the_record("runs").results if each.samples]
    assert losses == [pytest.approx([loss])] * (3 + 3 + 2)

    (path,) = Path("runs").glob("*.json")
    predicted, _ = command("predict", "--run", str(path))
    assert "GPipe n2m2" in predicted
    memory, _ = command("run", "tiny-words-memory", *SMALL, "--row", "GPipe n2m2", "--out", "runs")
    assert "measured peak, live bytes" in memory
    ablation, _ = command("run", "tiny-words-ablation", *SMALL, "--out", "runs")
    assert "like the published rows" in ablation
    # Show only these runs. tests/reproduce/report has the page with all committed records.
    monkeypatch.setattr("reproduce.cli.records.RESULTS", tmp_path / "results")
    command("report", "--out", "report.html")
    report = Path("report.html").read_text()
    assert report.count("Words, ours at equal batch size") == 1


def test_a_trace_that_cannot_be_written_ends_no_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.job.find_spec", lambda name: None)
    Path("t-naive-n2.json").mkdir()
    options = ("--row", "naive n2", "--steps", "1", "--out", "out", "--trace", "t")

    out, err = command("run", "tiny-speed", *SMALL, *options, code=2)

    assert "at equal batch size" in one_line(out)
    assert "no picture" in err
    *_, last = err.splitlines()
    assert last.startswith("reproduce: --trace: ")
    record = the_record()
    assert record.run is not None
    assert record.run.settings["rows"] == ["naive n2"]
    measured, emulated = record.results
    assert (measured.row, measured.status) == ("naive n2", "measured")
    assert (emulated.row, emulated.status) == ("naive n2", "emulated")


def test_a_failed_row_is_told_at_the_end(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    states: list[str] = []

    def fail(*_: object, **__: object) -> None:
        run = the_record().run
        states.append("unknown" if run is None else run.state)
        raise ValueError("no such luck")

    monkeypatch.setattr("reproduce.run.emulation.Training", fail)
    rows = ("--row", "n2m1", "--row", "n8m4")

    out, err = command("run", "tiny-speed", *SMALL, *rows, "--steps", "1", "--out", "out", code=2)

    assert "failed" in out
    *_, last = err.splitlines()
    said = "reproduce: 2 rows failed, the first being n2m1: ValueError: no such luck"
    assert last.startswith(said)
    assert set(states) == {"running"}, "if it was killed now, the record would say so"


@pytest.mark.usefixtures("tiny")
def test_a_run_without_any_row_fails(command: Any) -> None:
    options = ["--row", "n8m4", "--no-emulate", "--out", "out"]
    out, err = command("run", "tiny-speed", *SMALL, *options, code=2)

    assert "needs 8 devices" in one_line(out)
    *_, last = err.splitlines()
    assert last == "reproduce: no row has a number: needs 8 devices"
    (result,) = the_record().results
    assert result.status == "needs devices"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_keeps_what_was_finished(
    number: int,
    code: int,
    told: str,
    start: Any,
    broken_modules: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Check that `run` keeps the finished results after Ctrl-C or SIGTERM.

    The test also checks that `run` works if packages are missing that only other commands need.
    """
    others = {}
    for name in ("torchvision", "jinja2", "matplotlib", "scipy", "pytest"):
        others[name] = f"raise ImportError('{name} is not needed')"
    folder = broken_modules(**others)
    command = ["run", "tiny-speed", *SMALL, "--steps", "999", "--out", str(tmp_path / "out")]
    process = start(SCRIPT, *command, first=folder, TINY_SLEEP="0.05")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        # A run creates its file empty, to have the name for itself, and then replaces the file.
        begun = any(path.stat().st_size for path in Path("out").glob("*.json"))
        found = the_record().results if begun else []
        if any(each.row == "n8m4" and "step_time" in each.samples for each in found):
            break
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    *_, last = err.splitlines()
    assert last.startswith(f"{told}; 5 finished rows kept in ")
    assert last.endswith("; --resume goes on")
    record = the_record()
    assert record.run is not None
    assert record.run.state == "interrupted"
    kept = [(result.row, result.emulated) for result in record.results if result.samples]
    both = [("n2m1", False), ("n2m1", True), ("n2m4", False), ("n2m4", True)]
    assert kept == [*both, ("n8m4", True)]
    _, tables = sorted(Path("out").iterdir())
    assert "interrupted: 2" in tables.read_text(), "and no half-written file is left behind"
