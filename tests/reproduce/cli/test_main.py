"""Tests of the command line of `reproduce`: its help, `list`, and errors at the start."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import reproduce.__main__ as program
from reproduce.cli.main import COMMANDS, main
from reproduce.cli.plan import HEADROOM, OPTIMIZERS
from reproduce.cli.regression import regression
from reproduce.cli.shared import HARDWARE, HERE
from reproduce.error import missing
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import ROOT
from reproduce.machine.devices import GPU_DRIVERS, Devices
from reproduce.records.record import save
from reproduce.regression.job import Settings
from reproduce.tables.layout import WIDTH
from torchgpipe.plan import hardware_names, planner
from torchgpipe.plan.count import optimizer
from torchgpipe.plan.hardware import hardware

from ..made import one_line, record, row

SCREEN = 24  # the number of lines of a terminal
NAMES = tuple(EXPERIMENTS)
BY_SIGNALS = {"interrupted": 130, "ended by SIGTERM": 143}
PATIENCE = 300  # seconds; only a test that hangs takes as long
RUN_HERE = {
    "state": "finished",
    "command": ["run"],
    "started": "2020-04-21T10:00:00Z",
    "ended": "2020-04-21T10:07:00Z",
}
LATER = {"started": "2020-04-21T10:02:00Z"}
OF_A_ROW = ["run", "--row", "n2m1"]


ASKS_FOR_HELP = [[], *([command.name, "--help"] for command in COMMANDS)]


@pytest.mark.parametrize("arguments", ASKS_FOR_HELP)
def test_help_fits_a_screen_and_ends_with_two_examples(
    arguments: list[str], monkeypatch: Any, command: Any
) -> None:
    commands = {command.name: command for command in COMMANDS}
    most_lines = SCREEN
    if not arguments:
        most_lines = len(COMMANDS) + 13  # no command is left out
    elif len(commands[arguments[0]].params) > 8:
        most_lines = max(40, 14 + 2 * len(commands[arguments[0]].params))
    monkeypatch.chdir(ROOT)

    out, _ = command(*arguments)

    lines = out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= most_lines
    if not arguments:
        assert not any(line.endswith("...") for line in lines[1:]), "no summary is cut off"
    *_, title, one, other = lines
    assert title.strip() == "Examples:"
    for example in (one, other):
        program, name, *options = example.strip().removeprefix("python -m ").split()
        assert program == "reproduce"
        assert name in (arguments or commands)
        commands[name].make_context(name, options)  # raises if there is no such option or value


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], "?"),
        ([{}], "7"),
        ([{}, LATER], "5"),  # the newer run
        ([{}, {**LATER, "command": OF_A_ROW}, {**LATER, "state": "interrupted"}], "7"),
        ([{"folder": "measured"}], "(7)"),
        ([{}, {**LATER, "folder": "measured"}], "7"),
        ([{"several": True}], "<7"),
    ],
)
def test_the_list_says_how_long_a_run_has_taken_here(
    runs: list[dict[str, Any]],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduce.cli.list.MEASURED", Path("measured"))
    monkeypatch.setattr("reproduce.cli.list.find_devices", lambda *_: Devices("cpu", 2, 1))
    # Otherwise, the list says "-" if this machine has too little free memory for the experiment.
    monkeypatch.setattr(Devices, "memory", None)
    Path("runs").mkdir()
    Path("measured").mkdir()
    for number, changes in enumerate(runs):
        given = {**RUN_HERE, **changes}
        folder = given.pop("folder", "runs")
        rows = [row("x", 1.0, experiment="unet-speed")]
        if given.pop("several", False):
            rows.append(row("x", 1.0, experiment="unet-memory"))
        made = record(*rows, **given)
        save(replace(made, scale="small"), Path(folder) / f"r{number}.json")
    Path("runs/broken.json").write_text("{}")

    out, _ = command("list")

    (line,) = [line for line in out.splitlines() if line.startswith("unet-speed ")]
    *_, minutes = line.split()
    assert minutes == said
    as_json, _ = command("list", "--format", "json")
    for number in json.loads(as_json)["numbers"]:
        if (number["experiment"], number["metric"]) == ("unet-speed", "minutes"):
            value, upper = number["value"], number["upper"]
    if said == "?":
        assert value is upper is None
    elif "<" in said:
        assert (value, upper) == (None, 7)
    else:
        assert (value, upper) == (int(said.strip("()")), None)


def first_cells(lines: list[str], names: Sequence[str]) -> list[str]:
    """Return the first cell of each line of a table, if this cell is in `names`."""
    cells = [line.partition("  ")[0] for line in lines]
    return [cell for cell in cells if cell in names]


@pytest.mark.parametrize("devices", [Devices("cpu", 2, 1), Devices("cpu", 8, 16)], ids=str)
def test_the_list_is_a_screen_or_has_every_row(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.list.find_devices", lambda *_: devices)

    short, _ = command("list")
    monkeypatch.setattr("reproduce.cli.list.why_not", lambda *_: None)  # independent of free memory
    long, _ = command("list", *EXPERIMENTS)

    lines = short.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= SCREEN
    assert [line.split()[0] for line in lines if line.startswith(NAMES)] == list(NAMES)
    lines = long.splitlines()
    assert max(map(len, lines)) <= WIDTH
    flat = one_line(long)
    every_name = []
    for experiment in EXPERIMENTS.values():
        for scale in experiment.scales:
            names = [each.name for each in scale.rows]
            every_name += names
            count = len(names)
            fitting = 0
            for each in scale.rows:
                if each.devices <= devices.count and not each.name.endswith("/pb"):
                    fitting += 1
            some = f"measures up to {fitting} and emulates all of {count} rows"
            can_run = f"- on {devices}: can run; "
            assert f"{can_run}{some}" in flat or f"{can_run}all {count} rows" in flat
    assert sorted(first_cells(lines, every_name)) == sorted(every_name)


PRINTING = "print('a line', flush=True)"


def of_benchmarks(code: str) -> list[str]:
    """Return Python's arguments for code whose errors go to `fail`, as in benchmarks."""
    hook = "import sys\nfrom reproduce.error import fail\nsys.excepthook = fail\n"
    return ["-c", hook + code]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "reproduce", "list", "--on", "cpu"],
        of_benchmarks(f"import time\ntime.sleep(0.5)\n{PRINTING}"),
    ],
)
def test_a_reader_who_leaves_early_sees_no_traceback(
    arguments: list[str], start: Callable[..., Any]
) -> None:
    process = start("-u", *arguments)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 2
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_ends_a_benchmark_in_one_line(
    number: int, code: int, told: str, start: Callable[..., Any]
) -> None:
    process = start(
        "-c",
        "import time\n"
        "from benchmarks.harness import command\n"
        "command('a', 'A benchmark.')\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n",
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (out, err, process.returncode) == ("", f"{told}\n", code)


def test_another_broken_pipe_is_not_hidden() -> None:
    command = [sys.executable, *of_benchmarks("raise BrokenPipeError('of a worker')")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.stderr.endswith("BrokenPipeError: of a worker\n")
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "program"),
    [(["-m", "reproduce", "--help"], "reproduce: "), (of_benchmarks(PRINTING), "")],
)
def test_a_full_device_is_told_in_one_line(arguments: list[str], program: str) -> None:
    command = [sys.executable, *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    said = "cannot write: No space left on device; free space, or write the output elsewhere"
    assert ended.stderr == f"{program}{said}\n"
    assert ended.returncode == 2


PAPER = "results/paper"
ABSENT = "raise ModuleNotFoundError('No module', name={!r})"
LIBRARY = "raise OSError('libcudart.so.12: cannot open\\nshared object')"
# Ctrl-C must end the program even during an import that swallows the interrupt, like PyTorch's.
SWALLOWED = (
    "import os\ntry:\n    os.kill(os.getpid(), {})\n    [0] * 9\nexcept BaseException:\n    pass"
)


BROKEN: list[Any] = [
    ("show x", "torch", SWALLOWED.format(2), "interrupted"),
    ("list", "click", SWALLOWED.format(15), "ended by SIGTERM"),
    ("show x", "torch", LIBRARY, "torch is broken (libcudart.so.12"),
    (
        "plan unet",
        "torch",
        "import no_such_module",
        "torch is broken (No module named 'no_such_module')",
    ),
    ("show x", "torch", ABSENT.format("torch"), "torch is not installed"),
]
BROKEN += [
    ("list", name, ABSENT.format(name), f"{name} is not installed")
    for name in ("click", "msgspec", "tabulate", "tqdm")
]
for asked, name in (
    (f"compare {PAPER} {PAPER}", "scipy"),
    ("report", "matplotlib"),
    ("report", "jinja2"),
):
    advice = f"{name} is not installed: run 'make setup', or 'pip insta"
    row_of_table = asked, name, ABSENT.format(name), advice
    BROKEN.append(pytest.param(*row_of_table, marks=pytest.mark.slow))


@pytest.mark.parametrize(("command", "module", "statement", "said"), BROKEN)
def test_an_import_that_ends_the_program_is_one_line(
    command: str,
    module: str,
    statement: str,
    said: str,
    start: Callable[..., Any],
    broken_modules: Callable[..., Path],
) -> None:
    code = BY_SIGNALS.get(said, 2)
    folder = broken_modules(**{module: statement})

    process = start("-m", "reproduce", *command.split(), first=folder)
    out, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == code
    assert out == ""
    assert err.startswith(f"reproduce: {said}")
    assert err.count("\n") == 1


FAST = ["--help", "--version", "list", "run --wrong", "plan x --devices 0"]
FAST += [f"{command.name} --help" for command in COMMANDS]
WITHOUT = """import sys; from reproduce.cli.main import main
for words in sys.argv[1:]: main(words.split())
print('torch' in sys.modules)"""


def test_no_torch_where_nothing_is_run(start: Callable[..., Any]) -> None:
    """Check that commands which run no model do not import torch, which would take seconds.

    To avoid the import, the definitions of options repeat names and defaults of other modules. The
    test also checks that the repeated names and defaults equal those of the other modules.
    """
    process = start("-c", WITHOUT, *FAST)
    out, err = process.communicate(timeout=PATIENCE)
    assert out.endswith("\nFalse\n") or GPU_DRIVERS[0].exists(), err
    assert planner.HERE == HERE
    assert hardware_names() == HARDWARE
    assert tuple(optimizer.OPTIMIZERS) == OPTIMIZERS
    assert hardware.HEADROOM == HEADROOM
    offered = {option.name: option.default for option in regression.params}
    settings = Settings({})
    for name in ("restarts", "rounds", "clock", "slow_down"):
        assert offered[name] == getattr(settings, name)


def test_a_shell_completes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "_REPRODUCE_COMPLETE": "bash_complete",
        "COMP_WORDS": "reproduce run unet-sp",
        "COMP_CWORD": "2",
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out == "plain,unet-speed\n"


@pytest.mark.parametrize(
    ("version", "old"), [("2.10.1+cpu", True), ("2.11.0", False), ("3.0.0a0+git1", False)]
)
def test_a_version_of_pytorch(version: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"torch {version} is too old: install torch 2.11 or newer" if old else None
    monkeypatch.setattr("torch.__version__", version)
    assert missing("torch") == said


def test_a_bug_does_not_say_worse(
    start: Callable[..., Any], broken_modules: Callable[..., Path]
) -> None:
    folder = broken_modules(torch="raise ValueError('a bug')")
    process = start("-m", "reproduce", "show", "x", first=folder)
    _, err = process.communicate(timeout=PATIENCE)
    assert err.endswith("ValueError: a bug\n")
    assert process.returncode == 2


@pytest.mark.parametrize(("command", "started_over"), [("run", 1), ("list", 0)])
def test_a_run_keeps_freed_memory(
    command: str, started_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(program, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(program, "missing", lambda *_: "stop here")
    monkeypatch.setattr(sys, "argv", ["reproduce", command])
    assert program.main() == 2
    assert len(calls) == started_over
