"""Command line: it runs, and whatever is wrong is told in one line with an exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import reproduce.__main__ as program
from reproduce.cli.main import INTERRUPTED, main
from reproduce.cli.run import one_gpu_advice
from reproduce.experiments import Experiment
from reproduce.machine.devices import Devices
from reproduce.records.record import load
from reproduce.tables.layout import WIDTH

Tiny = Mapping[str, Experiment]
SMALL = ("--on", "cpu", "--scale", "small")
PATIENCE = 300  # seconds; only a hang takes as long


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "amoebanet-sped"], 2, "no experiment is called 'amoebanet-sped'; did you mean amoebanet-speed"),
        (["run", "x"], 2, "there are amoebanet-speed, amoebanet-memory"),
        (["run", "amoebanet-speed", "--seeds", "2"], 2, "--data, --seeds and --fresh are for experiments on accuracy"),
        (["run", "amoebanet-speed", "--stepps", "3"], 2, "--stepps"),
        (["run", "amoebanet-speed", "--on", "cpu", "--devices", "3"], 2, "machine offers 2; use at most 2"),
        (
            ["run", "amoebanet-speed", "--on", "cpu", "--scale", "paper"],
            2,
            "it needs CUDA devices with 22 GiB of memory",
        ),
        (["run", "tiny-speed", "--on", "meta"], 2, "--on meta is for experiments on memory: amoebanet-memory,"),
        (["run", "tiny-memory", "--on", "meta", "--scale", "small"], 2, "its balances are profiled, and devices that"),
        (["run", "tiny-speed", *SMALL, "--out", "/dev/null/x"], 1, "--out /dev/null/x: cannot be written (Not a dir"),
        (["run", "tiny-speed", *SMALL, "--row", "GPipe n2"], 2, "--row 'GPipe n2': no row is called so; did you mean"),
        (["run", "tiny-memory", *SMALL, "--trace", "t"], 2, "--trace: memory experiments time no step"),
        (["run", "tiny-speed", *SMALL, "--trace", "/dev"], 2, "--trace /dev: is a folder; name a file, such as"),
        (["run", "tiny-speed", *SMALL, "--trace", "/dev/null/x/t"], 1, "--trace /dev/null/x: cannot be written (Not"),
        (["show", "none.json"], 1, "none.json: cannot be read (No such file or directory)"),
        (["show", __file__], 1, "test_main.py: not JSON: trailing characters (byte 3)"),
        (["import-paper", "none.json"], 1, "none.json: cannot be read (No such file or directory)"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], code: int, said: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("reproduce: ") and said in err and err.count("\n") == 1


def test_out_is_tried_before_anything_is_measured(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reproduce.cli.run.Session", None)
    (tmp_path / "file").touch()
    assert main(["run", "tiny-speed", *SMALL, "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written (File exists); name another" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--on", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "amoebanet-speed, scale paper" in out and "amoebanet-memory, scale small" in out
    assert max(map(len, out.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (
            Devices("cuda", 1),
            "one CUDA device runs rows of one partition only; --on cpu runs pipelines on the CPU's 2 cores, "
            "at scale small",
        ),
        (Devices("cuda", 2), None),
        (Devices("cpu", 1, 2), None),
    ],
)
def test_advice_to_who_has_one_gpu(devices: Devices, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reproduce.cli.run.cores", lambda: 2)
    assert one_gpu_advice(devices) == said


def test_a_run_from_end_to_end(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out_folder = Path("new/folder")
    assert main(["run", "tiny-speed", "tiny-memory", *SMALL, "--steps", "2", "--out", str(out_folder)]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= WIDTH
    for said in ("at equal batch size", "how busy the devices", "the published models", "measured peak, live bytes"):
        assert said in " ".join(out.split())
    assert "1,844,858,344" in out and "needs 8 devices" in out
    assert err.startswith("scale small on 2 CPU devices of 1 thread")

    record_path, tables_path = sorted(out_folder.iterdir())
    assert record_path.stem == tables_path.stem and record_path.stem.startswith("tiny-speed_tiny-memory-small-2")
    record = load(record_path)
    assert record.run is not None and record.run.state == "finished" and record.run.ended is not None
    assert record.run.command[:3] == ["python", "-m", "reproduce"]
    assert record.run.settings["freed_memory"] in ("kept", "as the C library does")
    assert f"freed memory: {record.run.settings['freed_memory']}" in tables_path.read_text()
    assert record.run.settings["steps"] == 2 and record.run.settings["tiny-speed"]["warmup"] == 0
    found = {(result.row, result.scale): result for result in record.results}
    for name in ("naive n2", "checkpoint-only m1", "checkpoint-only m4", "GPipe n2m1", "GPipe n2m4"):
        times = found[name, "small"].samples["step_time"]
        assert len(times) == 2 and min(times) > 0
    assert sum(found["naive n2", "small"].config["balance"]) == 3 + 6
    peaks = found["pipeline-2", "small"].values
    assert len(peaks["peak_allocated"]) == 2 and sum(peaks["peak_allocated"]) > peaks["model_bytes"] > 0

    page = tables_path.read_text()
    assert page.count("\n## ") == 4 and "## AmoebaNet-D: speed" in page

    assert main(["show", str(record_path)]) == 0
    assert capsys.readouterr().out.strip() in out
    assert main(["show", "--markdown", str(record_path)]) == 0
    assert capsys.readouterr().out == page


def test_rows_and_their_traces(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rows = ("--row", "dep-str-ptl n2", "--row", "baseline n2")
    assert main(["run", "tiny-ablation", *SMALL, *rows, "--steps", "1", "--out", "out", "--trace", "t.png"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    written = [f"t-{row}.{kind}" for row in ("baseline-n2", "dep-str-ptl-n2") for kind in ("json", "png")]
    assert sorted(path.name for path in tmp_path.glob("t-*")) == written
    assert out.splitlines()[-4:] == written

    (path,) = Path("out").glob("*.json")
    record = load(path)
    assert [result.row for result in record.results] == ["baseline n2", "dep-str-ptl n2"]
    assert record.run is not None and record.run.settings["rows"] == ["dep-str-ptl n2", "baseline n2"]
    for result in record.results:
        assert len(result.values["utilization"]) == 2 and 0 < sum(result.values["utilization"]) <= 2
        assert 0 <= result.values["bubble"] < 1
        assert sum(result.values["peak_allocated"]) > result.values["model_bytes"] > 0
        events = json.loads(Path(f"t-{result.row.replace(' ', '-')}.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" and event["cat"] == "forward" for event in events) == 2 * 8


def test_a_trace_that_cannot_be_written_ends_no_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reproduce.cli.run.matplotlib_problem", lambda: "no picture")
    (tmp_path / "t.json").mkdir()
    row = ("--row", "naive n2", "--steps", "1")
    assert main(["run", "tiny-speed", *SMALL, *row, "--out", str(tmp_path), "--trace", str(tmp_path / "t")]) == 1
    out, err = capsys.readouterr()
    assert "at equal batch size" in " ".join(out.split())
    assert "no picture" in err and err.splitlines()[-1].startswith("reproduce: --trace: ")
    (path,) = tmp_path.glob("tiny*.json")
    assert load(path).results[0].status == "measured"


def test_a_failed_row_is_told_at_the_end(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("reproduce.run.session.Training", fail)
    assert main(["run", "tiny-speed", *SMALL, "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "failed" in out
    assert err.splitlines()[-1].startswith(
        "reproduce: 5 rows failed, the first being naive n2: ValueError: no such luck"
    )


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_finished(start: Callable[..., object], tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "tiny.py"
    process = start(
        str(script), "run", "tiny-speed", *SMALL, "--steps", "999", "--out", str(tmp_path), TINY_SLEEP="0.05"
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        files = list(tmp_path.glob("*.json"))
        if files and any(len(result.samples.get("step_time", [])) > 1 for result in load(files[0]).results):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted; 5 measured rows kept in ")
    assert out == ""

    (path,) = tmp_path.glob("*.json")
    record = load(path)
    assert record.run is not None and record.run.state == "interrupted"
    measured = [result for result in record.results if result.status == "measured"]
    assert len(measured) == 5 and all(len(result.samples["step_time"]) >= 2 for result in measured)
    assert "interrupted: 2" in path.with_suffix(".md").read_text()
    assert not list(tmp_path.glob(".*")), "no half-written file is left behind"


def test_a_kill_leaves_a_record_that_can_be_read(start: Callable[..., object], tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "tiny.py"
    process = start(str(script), "run", "tiny-memory", *SMALL, "--out", str(tmp_path), TINY_SLEEP="60")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None and not list(tmp_path.glob("*.json")):
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=PATIENCE)
    (path,) = tmp_path.glob("*.json")
    assert load(path).run.state == "running"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("module", "statement", "said"),
    [
        ("torch", "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "torch is not installed"),
        (
            "torch",
            "raise OSError('libcudart.so.12: cannot open\\nshared object')",
            "torch is broken (libcudart.so.12: can",
        ),
        ("torch", "import no_such_module", "torch is broken (no module no_such_module)"),
        ("torch", "__version__ = '2.5.1+cpu'", "torch 2.5.1+cpu is too old: install torch 2.11 or newer"),
        ("click", "raise ModuleNotFoundError('No module', name='click')", "click is not installed"),
        ("msgspec", "raise ModuleNotFoundError('No module', name='msgspec')", "msgspec is not installed"),
        ("tabulate", "raise ImportError('bad magic number')", "tabulate is broken (bad magic number)"),
    ],
)
def test_a_missing_package_is_one_line(
    module: str, statement: str, said: str, start: Callable[..., object], broken_modules: Callable[..., Path]
) -> None:
    packages = {"torch": "__version__ = '2.11.0'", module: statement}
    process = start("-m", "reproduce", "list", first=broken_modules(**packages))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"reproduce: {said}") and err.count("\n") == 1


@pytest.mark.slow
def test_only_torch_click_msgspec_and_tabulate_are_needed(
    start: Callable[..., object], broken_modules: Callable[..., Path], tmp_path: Path
) -> None:
    others = ("torchvision", "pynvml", "jinja2", "matplotlib", "scipy", "pytest")
    folder = broken_modules(**{name: f"raise ImportError('{name} is not needed')" for name in others})
    script = Path(__file__).parents[1] / "tiny.py"
    process = start(str(script), "run", "tiny-speed", *SMALL, "--steps", "1", "--out", str(tmp_path), first=folder)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    (path,) = tmp_path.glob("*.json")
    statuses = {result["status"] for result in json.loads(path.read_text())["results"]}
    assert statuses == {"measured", "needs devices"}


@pytest.mark.parametrize(("command", "started_over"), [("run", 1), ("list", 0)])
def test_a_run_keeps_freed_memory(command: str, started_over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(program, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(program, "missing", lambda: "stop here")
    monkeypatch.setattr(program, "signal", SimpleNamespace(SIGINT=2, signal=lambda *arguments: None))
    monkeypatch.setattr(sys, "argv", ["reproduce", command])
    assert program.main() == 1
    assert len(calls) == started_over


def test_a_reader_who_leaves_early_sees_no_traceback(start: Callable[..., object]) -> None:
    process = start("-u", "-m", "reproduce", "list", "--on", "cpu")
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_ctrl_c_while_pytorch_is_imported(start: Callable[..., object], broken_modules: Callable[..., Path]) -> None:
    """An import that swallows the interrupt, as PyTorch's does, must not keep the program going."""
    swallow = "import os\ntry:\n    os.kill(os.getpid(), 2)\n    [0] * 9\nexcept BaseException:\n    pass"
    process = start("-m", "reproduce", "list", first=broken_modules(torch=swallow))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "reproduce: interrupted\n")
