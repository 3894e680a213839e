"""Assemble the command line, `python -m reproduce`."""

import errno
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import click

from reproduce.cli.init_ci import init_ci
from reproduce.cli.list import list_experiments
from reproduce.cli.plan import plan
from reproduce.cli.predict import predict
from reproduce.cli.records import compare, history, import_paper, publish, render, report, show
from reproduce.cli.regression import regression
from reproduce.cli.run import run
from reproduce.cli.schedule import schedule
from reproduce.cli.shared import examples
from reproduce.error import (
    CANNOT_TELL,
    Error,
    Interrupted,
    handling,
    no_space,
    raise_signalled,
)
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
# Importing torchgpipe would import torch.
VERSION = runpy.run_path(str(ROOT / "torchgpipe" / "__version__.py"))["__version__"]
# The environment variable with which a shell asks for completions, or for its completion script.
COMPLETE = "_REPRODUCE_COMPLETE"


class Commands(click.Group):
    """The group of all commands. If Ctrl-C ends a command, one line is printed, not a traceback."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        try:
            with handling(raise_signalled):
                return super().invoke(context)
        except KeyboardInterrupt as interrupt:  # click would print an empty line
            raise Interrupted(interrupt) from None


@click.group(
    cls=Commands, commands=COMMANDS, epilog=examples("list", "run unet-memory --scale small")
)
@click.version_option(VERSION, prog_name="reproduce")
def cli() -> None:
    """Run the GPipe papers' experiments here. COMMAND --help explains a command."""


def main(arguments: Sequence[str] | None = None, benchmarks: Any = None) -> int:
    """Run a command line and return its exit code (`reproduce.error` defines the exit codes).

    An error is printed as one line on stderr.

    Args:
        arguments: The words of the command line. By default, the words that this process got.
        benchmarks: A function that makes the tables with results of benchmarks, for the command
            `render`. If it is None, `render` leaves these tables as they are.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    arguments = arguments or ["--help"]
    name = "reproduce" if COMPLETE in os.environ else "python -m reproduce"
    try:
        code = cli.main(arguments, name, COMPLETE, standalone_mode=False, obj=benchmarks)
    except click.ClickException as error:
        message = error.format_message()
        of_help = (click.MissingParameter, click.NoSuchOption)
        if isinstance(error, of_help) and error.ctx is not None:
            message += f" See '{error.ctx.command_path} --help'."
        return _complain(message, CANNOT_TELL)
    except Error as error:
        return _complain(str(error), error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _complain(str(no_space(error)), CANNOT_TELL)
    except ModuleNotFoundError as error:  # a package that only some commands need
        advice = f"run 'make setup', or 'pip install {error.name}'"
        return _complain(f"{error.name} is not installed: {advice}", CANNOT_TELL)
    except SystemExit as left:
        if left.code != 1:  # click exits with 1 when the reader of a pipe ends early
            raise
        return CANNOT_TELL
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    """Print an error in one line."""
    click.echo(f"reproduce: {' '.join(message.split())}", err=True)
    return code
