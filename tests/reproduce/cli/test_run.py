"""run: it writes a record and tables of its measurements, however it ends."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from reproduce.error import INTERRUPTED
from reproduce.experiments.row import Experiment
from reproduce.records.record import Record, load
from reproduce.tables.layout import WIDTH
from torchgpipe.tensors.observe import Kind

from ..tiny import Words

Tiny = Mapping[str, Experiment]
SCRIPT = str(Path(__file__).parents[1] / "tiny.py")
SMALL = ("--on", "cpu", "--scale", "small")
PATIENCE = 300  # seconds; only a hang takes as long
pytestmark = pytest.mark.usefixtures("here")


def the_record(folder: str = "out") -> Record:
    (path,) = Path(folder).glob("*.json")
    return load(path)


def test_from_end_to_end(tiny: Tiny, command: Any) -> None:
    """Of some rows; measured and emulated steps have traces of their own."""
    rows = ("n2m1", "n8m4", "n8m4/pb", "naive n2", "GPipe n2m4", "baseline", "pipeline-8")
    into = ("--out", "new/folder", "--trace", "t.png")
    only = [word for row in rows for word in ("--row", row)]
    out, err = command("run", "tiny-speed", "tiny-memory", *SMALL, *only, "--steps", "2", *into)
    assert max(map(len, out.splitlines())) <= WIDTH
    flat = " ".join(out.split())
    titles = (
        "like the published rows",
        "published balance is worth",
        "at equal batch size",
        "live bytes",
    )
    assert sorted(titles, key=flat.index) == list(titles), "a group's table follows when it is done"
    assert "1,844,858,344" in out and err.startswith("scale small on 2 CPU devices of 1 thread")

    record_path, tables_path = sorted(Path("new/folder").iterdir())
    assert record_path.stem == tables_path.stem and record_path.stem.startswith(
        "tiny-speed_tiny-memory-small-2"
    )
    record, page = load(record_path), tables_path.read_text()
    assert (
        record.run is not None and record.run.state == "finished" and record.run.ended is not None
    )
    assert record.run.command[:3] == ["python", "-m", "reproduce"]
    kept = "the C library kept freed memory" in page
    assert record.run.settings["freed_memory"] == ("kept" if kept else "as the C library does")
    assert (record.run.settings["steps"], record.run.settings["emulate"]) == (2, 8)
    found = {
        (result.row, result.emulated): result
        for result in record.results
        if result.scale == "small"
    }
    written, orders = {str(record_path), str(tables_path)}, dict[str, list[tuple[int, str, int]]]()
    for row in (row for row in tiny["tiny-speed"].scale("small").rows if row.name in rows):
        for emulated in (True,) if row.devices == 8 else (True, False):
            result = found[row.name, emulated]
            assert len(result.samples["step_time"]) == 2 and min(result.samples["step_time"]) > 0
            assert (
                len(result.values["utilization"]) == row.devices
                and sum(result.config["balance"]) == 3 + 6
            )
            assert (
                0 < sum(result.values["utilization"]) <= row.devices
                and 0 <= result.values["bubble"] < 1
            )
            trace = f"t-{row.name.replace(' ', '-').replace('/', '-')}{'-emulated' * emulated}"
            whole = json.loads(Path(f"{trace}.json").read_text())
            tasks = [
                x for x in whole["traceEvents"] if x["ph"] == "X" and x["cat"] in get_args(Kind)[:3]
            ]
            step = (
                1e6 * whole["otherData"]["step_seconds"][0] + 0.001
            )  # microseconds, and what rounding may add
            assert all(0 <= x["ts"] < x["ts"] + x["dur"] <= step for x in tasks)
            tasks.sort(key=lambda x: (x["tid"], x["ts"]))
            order = [(x["tid"], x["cat"], x["args"]["micro-batch"]) for x in tasks]
            assert orders.setdefault(row.name, order) == order, "emulated as in a real run"
            assert sum(kind == "forward" for _, kind, _ in order) == (row.chunks or 1) * row.devices
            written |= {f"{trace}.json", f"{trace}.png"}
    peaks = found["pipeline-8", False].values
    assert (
        len(peaks["peak_allocated"]) == 8
        and sum(peaks["peak_allocated"]) > peaks["model_bytes"] > 0
    )
    assert page.count("\n## ") == 6, (
        "the page has the tables of the run, and one of how busy the devices were"
    )

    assert set(out.splitlines()) <= set(command("show", str(record_path))[0].splitlines()), (
        "nothing but tables"
    )
    assert written == {
        str(path) for folder in (".", "new/folder") for path in Path(folder).glob("*.*")
    }
    assert {*err.splitlines()[-len(written) :]} == written and err.splitlines()[
        -len(written) - 1
    ] == "written:"
    assert command("show", "--format", "markdown", str(record_path))[0] == page


def test_words_from_end_to_end(tiny: Tiny, command: Any) -> None:
    """Rows of any engine have the loss of the module itself."""
    command(
        "run",
        "tiny-words",
        *SMALL,
        "--engine",
        "threads",
        "--engine",
        "ranks",
        "--steps",
        "1",
        "--out",
        "runs",
    )
    row = tiny["tiny-words"].scale("small").rows[0]
    torch.manual_seed(0)
    module, (input, target) = Words(8, 11), row.sized.batch(4)
    losses = [each.samples["loss"] for each in the_record("runs").results if each.samples]
    assert losses == [pytest.approx([row.criterion(module(**input), target).item()])] * (3 + 3 + 2)
    (path,) = Path("runs").glob("*.json")
    assert "GPipe n2m2" in command("predict", "--run", str(path))[0]
    for measures, said in (
        ("memory", "measured peak, live bytes"),
        ("ablation", "like the published rows"),
    ):
        assert said in command("run", f"tiny-words-{measures}", *SMALL, "--out", "runs")[0]
    command("report", "--out", "report.html")
    assert Path("report.html").read_text().count("Words, ours at equal batch size") == 1


def test_a_trace_that_cannot_be_written_ends_no_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.job.find_spec", lambda name: None)
    Path("t-naive-n2.json").mkdir()
    options = ("--row", "naive n2", "--steps", "1", "--out", "out", "--trace", "t")
    out, err = command("run", "tiny-speed", *SMALL, *options, code=2)
    assert "at equal batch size" in " ".join(out.split())
    assert "no picture" in err and err.splitlines()[-1].startswith("reproduce: --trace: ")
    record = the_record()
    assert record.run is not None and record.run.settings["rows"] == ["naive n2"]
    assert [(each.row, each.status) for each in record.results] == [
        ("naive n2", "measured"),
        ("naive n2", "emulated"),
    ]


def test_a_failed_row_is_told_at_the_end(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    states: list[str] = []

    def fail(*_: object, **__: object) -> None:
        states.append(getattr(the_record().run, "state", "unknown"))
        raise ValueError("no such luck")

    monkeypatch.setattr("reproduce.run.emulation.Training", fail)
    rows = ("--row", "n2m1", "--row", "n8m4")
    out, err = command("run", "tiny-speed", *SMALL, *rows, "--steps", "1", "--out", "out", code=2)
    said = "reproduce: 2 rows failed, the first being n2m1: ValueError: no such luck"
    assert "failed" in out and err.splitlines()[-1].startswith(said)
    assert {*states} == {"running"}, "what a kill leaves says that it was running"


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_finished(
    start: Any, broken_modules: Callable[..., Path], tmp_path: Path
) -> None:
    """A run needs only torch, click, msgspec, tabulate and tqdm."""
    others = ("torchvision", "pynvml", "jinja2", "matplotlib", "scipy", "pytest")
    folder = broken_modules(
        **{name: f"raise ImportError('{name} is not needed')" for name in others}
    )
    command = ["run", "tiny-speed", *SMALL, "--steps", "999", "--out", str(tmp_path / "out")]
    process = start(SCRIPT, *command, first=folder, TINY_SLEEP="0.05")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        found = the_record().results if list(Path("out").glob("*.json")) else []
        if any(each.row == "n8m4" and "step_time" in each.samples for each in found):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (INTERRUPTED, "") and "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted; 5 finished rows kept in ")

    record = the_record()
    assert record.run is not None and record.run.state == "interrupted"
    kept = [(result.row, result.emulated) for result in record.results if result.samples]
    assert kept == [
        (row, kind) for row in ("n2m1", "n2m4", "n8m4") for kind in (False, True)[row == "n8m4" :]
    ]
    _, tables = sorted(Path("out").iterdir())
    assert "interrupted: 2" in tables.read_text(), "and no half-written file is left behind"
