"""Tests that an option means the same in all commands, and that commands have the usual options.

The table `ONE_WORD` has the options that several commands share, as the help shows them.
"""

from collections.abc import Iterator
from typing import Any

import click
import pytest

from reproduce.cli.main import COMMANDS, cli
from reproduce.error import Error
from reproduce.regression.job import Settings
from reproduce.tables.output import FORMATS

FORMAT = {"--format FORMAT"}
ONE_WORD: dict[str, set[str]] = {
    "--format": FORMAT,
    "--devices": {"-n, --devices N"},
    "--out": {"--out FILE", "--out DIR"},
    "--threshold": {"--threshold SHARE"},
    "--alpha": {"--alpha RISK"},
    "--seed": {"--seed N"},
    "--hardware": {"--hardware NAME|FILE"},
    "--on": {"--on [cpu|cuda|meta]"},
    "--autocast": {"--autocast TYPE"},
    "--fp32-precision": {"--fp32-precision TYPE"},
    "--package": {"--package NAME"},
    "--cases": {"--cases FILE"},
    "--build": {"--build COMMAND"},
    "--trace": {"--trace FILE"},
    "--all": {"--all"},
    "--force": {"--force"},
}
# The commands that print results have the option `--format`; the others write files.
PRINTS = ["list", "run", "show", "compare", "history", "predict", "plan", "regression", "schedule"]
WRITES = ["run", "history", "report", "predict", "regression", "schedule", "import-paper"]


def forms() -> Iterator[tuple[str, str, str]]:
    """Yield three texts for each option of each command.

    The texts are the name of the command, the name of the option, and the option as the help shows
    it, such as "--seed N".
    """
    for command in COMMANDS:
        context = click.Context(command)
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                shown = parameter.get_help_record(context)
                assert shown is not None, "no option is hidden"
                assert command.name is not None
                yield command.name, max(parameter.opts, key=len), shown[0]


def test_an_option_has_one_form() -> None:
    found: dict[str, set[str]] = {}
    commands: dict[str, list[str]] = {}
    for command, option, form in forms():
        found.setdefault(option, set()).add(form)
        commands.setdefault(option, []).append(command)

    shared = {option: found[option] for option, having in commands.items() if len(having) > 1}

    for option, having in shared.items():
        assert having <= ONE_WORD[option], option
    assert set(PRINTS) == set(commands["--format"])
    assert set(WRITES) == set(commands["--out"])


def test_every_command_is_in_the_help(command: Any) -> None:
    out, _ = command("--help")
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert {"publish", "import-paper"} <= listed
    assert set(cli.commands) <= listed


def test_a_regression_draws_with_its_seed(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    seeds = []

    def answer(asked: Any, settings: Settings, *_: Any) -> None:
        seeds.append(settings.seed)
        raise Error("enough")

    monkeypatch.setattr("reproduce.regression.main.answer", answer)
    command("regression", "--base", "v1", "--seed", "3", code=2)
    assert seeds == [3]


@pytest.mark.parametrize("asked", ["--json", "--csv", "--format xml"])
def test_another_word_is_refused(asked: str, command: Any) -> None:
    _, err = command("list", *asked.split(), code=2)
    assert err.count("\n") == 1
    said = ", ".join(f"'{name}'" for name in FORMATS)
    assert "See 'python -m reproduce list --help'" in err or said in err
