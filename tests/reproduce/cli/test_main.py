"""Command line: whatever is wrong is told in one line with an exit code, also before the program can run at all."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import reproduce.__main__ as program
from reproduce.cli.main import COMMANDS, main
from reproduce.cli.run import INTERRUPTED
from reproduce.experiments import EXPERIMENTS, Experiment
from reproduce.machine.devices import Devices
from reproduce.tables.layout import WIDTH

PATIENCE = 300  # seconds; only a hang takes as long
RESULTS = Path(__file__).resolve().parents[3] / "results"
SPEED, MEMORY = ("run tiny-speed --on cpu --scale small", "run tiny-memory --on cpu --scale small")
GRID = "compare record.json record.json --row"
PREDICT = "predict --hardware here"
REPORT = "report --results results"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a published table and files that are none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("results/paper", "empty", "broken/paper"):
        Path(folder).mkdir(parents=True)
    shutil.copy(RESULTS / "paper" / "tg-unet-speed.json", "results/paper")
    shutil.copy(RESULTS / "paper" / "tg-unet-speed.json", "record.json")
    Path("broken/paper/x.json").write_text("{}")
    Path("text").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("lst", 2, "No such command 'lst'"),
        ("run amoebanet-speed --stepps 3", 2, "--stepps"),
        ("run amoebanet-sped", 2, "no experiment is called 'amoebanet-sped'; did you mean amoebanet-speed"),
        ("run x", 2, "there are amoebanet-speed, amoebanet-memory"),
        ("run tiny-accuracy --scale small --data x", 2, "--data x: scale small makes its own data; leave --data out"),
        ("run tiny-accuracy --on cpu --data x", 2, "--scale paper: it needs CUDA devices with 22 GiB of memory each"),
        ("run amoebanet-speed --seeds 2", 2, "--data and --seeds are for experiments on accuracy"),
        ("run amoebanet-memory --engine ranks", 2, "--engine is for experiments that time steps"),
        ("run amoebanet-speed --on cpu --devices 3", 2, "machine offers 2; use at most 2"),
        ("run amoebanet-speed --on cpu --scale paper", 2, "it needs CUDA devices with 22 GiB of memory"),
        ("run tiny-memory tiny-speed --on meta", 2, "--on meta is for experiments on memory: amoebanet-memory,"),
        ("run tiny-memory --on meta --scale small", 2, "its balances are profiled, and devices that"),
        (f"{SPEED} --out text", 1, "--out text: cannot be written (File exists); name another"),
        (f"{SPEED} --row GPipe_n2", 2, "--row 'GPipe_n2': no row is called so; did you mean"),
        (f"{MEMORY} --trace t", 2, "--trace: memory experiments time no step"),
        (f"{SPEED} --trace empty", 2, "'--trace': File 'empty' is a directory."),
        (f"{SPEED} --trace /dev/null/x/t", 1, "--trace /dev/null/x: cannot be written (Not a directory)"),
        ("show none.json", 1, "none.json: cannot be read (No such file or directory)"),
        ("show text", 1, "text: not JSON: "),
        ("import-paper none.json", 1, "none.json: cannot be read (No such file or directory)"),
        ("compare record.json", 2, "compare at least two sides, and at most 26; given: 1"),
        ("compare record.json nowhere", 2, "nowhere: no such file or folder, and no git revision here"),
        ("compare record.json text", 1, "text: not JSON"),
        ("compare record.json record.json --alpha 0", 2, "'--alpha'"),
        (f"{GRID} n", 2, "--row and --col go together"),
        (f"{GRID} n --col m --format csv", 2, "text or markdown, not csv"),
        (PREDICT, 2, "name either experiments, or a run by --run"),
        (f"{PREDICT} unet-speed --run record.json", 2, "name either experiments, or a run by --run"),
        (f"{PREDICT} --run record.json", 2, "--run record.json: it has no emulated rows"),
        (f"{PREDICT} --run record.json --out .", 2, "--out is for published tables"),
        (f"{PREDICT} unet-speed", 2, "predict --run RUN --hardware here those of a run"),
        ("report --results nowhere", 2, "'--results': Directory 'nowhere' does not exist."),
        ("report --results empty", 2, "--results empty: no record (*.json) in its folders paper, predicted, measured"),
        ("report --results broken", 1, 'broken/paper/x.json: not a record (its "format" is not'),
        (f"{REPORT} --out no/r.html", 1, "no/r.html: cannot be written (No such file or directory)"),
        (f"{REPORT} --trace none.json", 1, "none.json: cannot be read (No such file or directory)"),
        ("regression", 2, "give --base REV, or --bisect GOOD BAD"),
        ("regression --base HEAD --markdown /dev/null/x", 1, "--markdown /dev/null: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: str, code: int, said: str, tiny: Mapping[str, Experiment], here: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("reproduce.cli.run.Session", None)  # it is told before anything is measured
    assert main(arguments.split()) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reproduce: ") and said in err and err.count("\n") == 1
    assert not Path("results/report.html").exists()


@pytest.mark.parametrize("arguments", [[], *([command.name, "--help"] for command in COMMANDS)])
def test_help_fits_80_columns(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert arguments or not any(line.endswith("...") for line in lines[1:]), "no command's summary is cut off"


@pytest.mark.parametrize("devices", [Devices("cpu", 2, 1), Devices("cpu", 8, 16)], ids=str)
def test_the_list_has_every_row(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reproduce.cli.list.find_devices", lambda *_: devices)
    monkeypatch.setattr("reproduce.cli.list.why_not", lambda *_: None)  # whatever memory is free
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    scales = [scale for experiment in EXPERIMENTS.values() for scale in experiment.scales]
    names = [row.name for scale in scales for row in scale.rows]
    assert sorted(line.partition("  ")[0] for line in lines if line.partition("  ")[0] in names) == sorted(names)
    for scale in scales:
        every = len(scale.rows)
        fitting = sum(row.devices <= devices.count and not row.name.endswith("/pb") for row in scale.rows)
        said = (f"measures {fitting} and emulates all of {every} rows", f"all {every} rows")
        assert any(f"- on {devices}: can run; {each}" in " ".join([*map(str.strip, lines), ""]) for each in said)


def test_a_reader_who_leaves_early_sees_no_traceback(start: Callable[..., Any]) -> None:
    process = start("-u", "-m", "reproduce", "list", "--on", "cpu")
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


ABSENT = "raise ModuleNotFoundError('No module', name={!r})"


@pytest.mark.parametrize(
    ("module", "statement", "said"),
    [
        ("torch", ABSENT.format("torch"), "torch is not installed"),
        ("torch", "raise OSError('libcudart.so.12: cannot open\\nshared object')", "torch is broken (libcudart.so.12"),
        ("torch", "import no_such_module", "torch is broken (No module named 'no_such_module')"),
        *((name, ABSENT.format(name), f"{name} is not installed") for name in ("click", "msgspec", "tabulate")),
    ],
)
def test_a_missing_package_is_one_line(
    module: str, statement: str, said: str, start: Callable[..., Any], broken_modules: Callable[..., Path]
) -> None:
    packages = {"torch": "__version__ = '2.11.0'", module: statement}
    process = start("-m", "reproduce", "list", first=broken_modules(**packages))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"reproduce: {said}") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("command", "package"), [("compare", "scipy"), ("report", "matplotlib"), ("report", "jinja2")])
def test_a_package_that_one_command_needs(
    command: str, package: str, start: Callable[..., Any], broken_modules: Callable[..., Path]
) -> None:
    sides = ["results/paper"] * 2 if command == "compare" else []
    process = start("-m", "reproduce", command, *sides, first=broken_modules(**{package: ABSENT.format(package)}))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert err == f"reproduce: {package} is not installed: run 'make setup', or 'pip install {package}'\n"


@pytest.mark.parametrize(("version", "old"), [("2.10.1+cpu", True), ("2.11.0", False), ("3.0.0a0+git1", False)])
def test_a_version_of_pytorch(version: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    assert program.missing() == (f"torch {version} is too old: install torch 2.11 or newer" if old else None)


def test_ctrl_c_while_pytorch_is_imported(start: Callable[..., Any], broken_modules: Callable[..., Path]) -> None:
    """An import that swallows the interrupt, as PyTorch's does, must not keep the program going."""
    swallow = "import os\ntry:\n    os.kill(os.getpid(), 2)\n    [0] * 9\nexcept BaseException:\n    pass"
    process = start("-m", "reproduce", "list", first=broken_modules(torch=swallow))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "reproduce: interrupted\n")


@pytest.mark.parametrize(("command", "started_over"), [("run", 1), ("list", 0)])
def test_a_run_keeps_freed_memory(command: str, started_over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(program, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(program, "missing", lambda: "stop here")
    monkeypatch.setattr(program, "signal", SimpleNamespace(SIGINT=2, signal=lambda *arguments: None))
    monkeypatch.setattr(sys, "argv", ["reproduce", command])
    assert program.main() == 1
    assert len(calls) == started_over
