"""Assemble the command line, `python -m reproduce`."""

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import click

from reproduce.cli.list import list_experiments
from reproduce.cli.predict import plan, predict, schedule
from reproduce.cli.records import compare, history, import_paper, publish, render, report, show
from reproduce.cli.regression import init_ci, regression
from reproduce.cli.run import run
from reproduce.cli.shared import examples
from reproduce.error import CANNOT_TELL, INTERRUPTED, Error
from reproduce.machine.description import ROOT

COMMANDS = [
    list_experiments,
    run,
    show,
    publish,
    compare,
    history,
    report,
    render,
    predict,
    plan,
    regression,
    schedule,
    init_ci,
    import_paper,
]
VERSION = runpy.run_path(str(ROOT / "torchgpipe" / "__version__.py"))[
    "__version__"
]  # without torch
COMPLETE = "_REPRODUCE_COMPLETE"  # with it, a shell asks for completions, or for its script


@click.group(commands=COMMANDS, epilog=examples("list", "run unet-memory --scale small"))
@click.version_option(VERSION, prog_name="reproduce")
def cli() -> None:
    """Run the papers' experiments here, and compare. COMMAND --help says more."""


def main(arguments: Sequence[str] | None = None, benchmarks: Any = None) -> int:
    """Run the command line and return its exit code (`reproduce.error`); an error is one line on stderr.

    `benchmarks` makes the tables of that folder. Only the command `render` uses it.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        name = "reproduce" if COMPLETE in os.environ else "python -m reproduce"
        code = cli.main(arguments, name, COMPLETE, standalone_mode=False, obj=benchmarks)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.MissingParameter) and error.ctx is not None:
            message += f" See '{error.ctx.command_path} --help'."
        return _complain(message, CANNOT_TELL)
    except Error as error:
        return _complain(str(error), error.exit_code)
    except ModuleNotFoundError as error:  # a package that only some commands need
        return _complain(
            f"{error.name} is not installed: run 'make setup', or 'pip install {error.name}'",
            CANNOT_TELL,
        )
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", INTERRUPTED)
    except SystemExit as left:
        if left.code != 1:  # click's, where a reader has gone early
            raise
        return CANNOT_TELL
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    click.echo(f"reproduce: {' '.join(message.split())}", err=True)
    return code
