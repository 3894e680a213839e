"""Command line: help, list, and what keeps the program from starting. Ctrl-C works wherever it arrives."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import reproduce.__main__ as program
from reproduce.cli.main import COMMANDS, main
from reproduce.cli.plan import HEADROOM, OPTIMIZERS
from reproduce.cli.regression import regression
from reproduce.cli.shared import HARDWARE, HERE
from reproduce.error import INTERRUPTED, interruptible, missing
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import ROOT
from reproduce.machine.devices import GPU_DRIVERS, Devices
from reproduce.records.record import save
from reproduce.regression.job import Settings
from reproduce.tables.layout import WIDTH
from torchgpipe.plan import hardware_names, planner
from torchgpipe.plan.count import optimizer
from torchgpipe.plan.hardware import hardware

from ..made import record, row

SCREEN = 24  # lines of a terminal
PRESS = partial(signal.raise_signal, signal.SIGINT)
PATIENCE = 300  # seconds; only a hang takes as long
RUN_HERE = {
    "state": "finished",
    "command": ["run"],
    "started": "2020-04-21T10:00:00Z",
    "ended": "2020-04-21T10:07:00Z",
}
LATER = {"started": "2020-04-21T10:02:00Z"}


@pytest.mark.parametrize("arguments", [[], *([command.name, "--help"] for command in COMMANDS)])
def test_help_fits_a_screen_and_ends_with_two_examples(
    arguments: list[str], monkeypatch: Any, command: Any
) -> None:
    lines = command(*arguments)[0].splitlines()
    commands = {command.name: command for command in COMMANDS}
    many_options = arguments and len(commands[arguments[0]].params) > 8
    assert max(map(len, lines)) <= WIDTH and len(lines) <= (40 if many_options else SCREEN)
    assert arguments or not any(line.endswith("...") for line in lines[1:]), (
        "no command's summary is cut off"
    )
    title, *examples = lines[-3:]
    assert title.strip() == "Examples:"
    monkeypatch.chdir(ROOT)
    for example in examples:
        program, name, *options = example.strip().removeprefix("python -m ").split()
        assert program == "reproduce" and name in (arguments or commands)
        commands[name].make_context(name, options)  # raises if there is no such option or value


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], "?"),
        ([{}], "7"),
        ([{}, LATER], "5"),  # the newer one
        (
            [{}, {**LATER, "command": ["run", "--row", "n2m1"]}, {**LATER, "state": "interrupted"}],
            "7",
        ),
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
    Path("runs").mkdir()
    Path("measured").mkdir()
    for number, changes in enumerate(runs):
        folder = changes.get("folder", "runs")
        names = ["unet-speed", "unet-memory"][: 1 + ("several" in changes)]
        given = {
            name: value for name, value in changes.items() if name not in ("several", "folder")
        }
        made = record(*(row("x", 1.0, experiment=name) for name in names), **{**RUN_HERE, **given})
        save(replace(made, scale="small"), Path(folder) / f"r{number}.json")
    Path("runs/broken.json").write_text("{}")
    (line,) = [line for line in command("list")[0].splitlines() if line.startswith("unet-speed ")]
    assert line.split()[-1] == said


@pytest.mark.parametrize("devices", [Devices("cpu", 2, 1), Devices("cpu", 8, 16)], ids=str)
def test_the_list_is_a_screen_or_has_every_row(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.list.find_devices", lambda *_: devices)
    lines = command("list")[0].splitlines()
    assert max(map(len, lines)) <= WIDTH and len(lines) <= SCREEN
    assert [
        line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in EXPERIMENTS
    ] == [*EXPERIMENTS]
    monkeypatch.setattr("reproduce.cli.list.why_not", lambda *_: None)  # independent of free memory
    lines = command("list", *EXPERIMENTS)[0].splitlines()
    assert max(map(len, lines)) <= WIDTH
    scales = [scale for experiment in EXPERIMENTS.values() for scale in experiment.scales]
    names = [row.name for scale in scales for row in scale.rows]
    assert sorted(
        line.partition("  ")[0] for line in lines if line.partition("  ")[0] in names
    ) == sorted(names)
    for scale in scales:
        every = len(scale.rows)
        fitting = sum(
            row.devices <= devices.count and not row.name.endswith("/pb") for row in scale.rows
        )
        said = (f"measures {fitting} and emulates all of {every} rows", f"all {every} rows")
        assert any(
            f"- on {devices}: can run; {each}" in " ".join([*map(str.strip, lines), ""])
            for each in said
        )


def test_a_reader_who_leaves_early_sees_no_traceback(start: Callable[..., Any]) -> None:
    process = start("-u", "-m", "reproduce", "list", "--on", "cpu")
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 2
    assert process.stderr.read() == ""
    process.stderr.close()


PAPER = "results/paper"
ABSENT = "raise ModuleNotFoundError('No module', name={!r})"
LIBRARY = "raise OSError('libcudart.so.12: cannot open\\nshared object')"
# Ctrl-C must end the program even during an import that swallows the interrupt, as PyTorch's does.
SWALLOWED = (
    "import os\ntry:\n    os.kill(os.getpid(), 2)\n    [0] * 9\nexcept BaseException:\n    pass"
)


@pytest.mark.parametrize(
    ("command", "module", "statement", "said"),
    [
        ("show x", "torch", SWALLOWED, "interrupted"),
        ("show x", "torch", LIBRARY, "torch is broken (libcudart.so.12"),
        (
            "plan unet",
            "torch",
            "import no_such_module",
            "torch is broken (No module named 'no_such_module')",
        ),
        *(
            (command, name, ABSENT.format(name), f"{name} is not installed")
            for command, name in (
                ("show x", "torch"),
                *(("list", x) for x in ("click", "msgspec", "tabulate", "tqdm")),
            )
        ),
        *(
            pytest.param(
                command,
                name,
                ABSENT.format(name),
                f"{name} is not installed: run 'make setup', or 'pip insta",
                marks=pytest.mark.slow,
            )
            for command, name in (
                (f"compare {PAPER} {PAPER}", "scipy"),
                ("report", "matplotlib"),
                ("report", "jinja2"),
            )
        ),
    ],
)
def test_an_import_that_ends_the_program_is_one_line(
    command: str,
    module: str,
    statement: str,
    said: str,
    start: Callable[..., Any],
    broken_modules: Callable[..., Path],
) -> None:
    process = start(
        "-m", "reproduce", *command.split(), first=broken_modules(**{module: statement})
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (INTERRUPTED if statement == SWALLOWED else 2, "")
    assert err.startswith(f"reproduce: {said}") and err.count("\n") == 1


FAST = [
    "--help",
    *(f"{x.name} --help" for x in COMMANDS),
    "--version",
    "list",
    "run --wrong",
    "plan x --devices 0",
]
WITHOUT = """import sys; from reproduce.cli.main import main
for words in sys.argv[1:]: main(words.split())
print('torch' in sys.modules)"""


def test_no_torch_where_nothing_is_run(start: Callable[..., Any]) -> None:
    """It takes seconds. So options repeat what the planner knows."""
    out, err = start("-c", WITHOUT, *FAST).communicate(timeout=PATIENCE)
    assert out.endswith("\nFalse\n") or GPU_DRIVERS[0].exists(), err
    assert (planner.HERE, hardware_names(), tuple(optimizer.OPTIMIZERS)) == (
        HERE,
        HARDWARE,
        OPTIMIZERS,
    )
    assert HEADROOM == hardware.HEADROOM
    offered, settings = {option.name: option.default for option in regression.params}, Settings({})
    assert all(
        offered[name] == getattr(settings, name)
        for name in ("restarts", "rounds", "clock", "slow_down")
    )


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
    monkeypatch.setattr("torch.__version__", version)
    assert missing("torch") == (
        f"torch {version} is too old: install torch 2.11 or newer" if old else None
    )


def test_a_bug_does_not_say_worse(
    start: Callable[..., Any], broken_modules: Callable[..., Path]
) -> None:
    process = start(
        "-m", "reproduce", "show", "x", first=broken_modules(torch="raise ValueError('a bug')")
    )
    assert (
        process.communicate(timeout=PATIENCE)[1].endswith("ValueError: a bug\n")
        and process.returncode == 2
    )


@pytest.mark.parametrize(("command", "started_over"), [("run", 1), ("list", 0)])
def test_a_run_keeps_freed_memory(
    command: str, started_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(program, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(program, "missing", lambda *_: "stop here")
    monkeypatch.setattr(
        program, "signal", SimpleNamespace(SIGINT=2, signal=lambda *arguments: None)
    )
    monkeypatch.setattr(sys, "argv", ["reproduce", command])
    assert program.main() == 2
    assert len(calls) == started_over


class Dying:
    """An object whose destructor calls a function. Python swallows exceptions there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()
        sum(range(1000))  # Python handles the signal here


def test_strikes_where_the_program_is_and_leaves_everything_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        check()
        PRESS()
        pytest.fail("not reached")
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_is_remembered_where_python_swallows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other exceptions in destructors are still shown."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
    with interruptible() as check:
        Dying(lambda: 1 / 0)
        Dying(PRESS)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert shown == [ZeroDivisionError]
