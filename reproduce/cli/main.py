"""Assemble the command line, `python -m reproduce`."""

import sys
from collections.abc import Sequence

import click

from reproduce.cli.list import list_experiments
from reproduce.cli.predict import plan, predict
from reproduce.cli.records import compare, import_paper, publish, render, report, show
from reproduce.cli.regression import regression
from reproduce.cli.run import INTERRUPTED, run
from reproduce.cli.shared import examples
from reproduce.error import Error
from reproduce.tables.render import Maker

COMMANDS = [list_experiments, run, show, publish, compare, report, render, predict, plan, regression,
            import_paper]  # fmt: skip


@click.group(commands=COMMANDS, epilog=examples("list", "run unet-memory --scale small"))
def cli() -> None:
    """Run the papers' experiments on this machine, and compare with what was published. COMMAND --help says more."""


def main(arguments: Sequence[str] | None = None, benchmarks: Maker | None = None) -> int:
    """Run the command line and return its exit code; an error is one line on stderr.

    `benchmarks` makes the tables of that folder. Only the command `render` uses it.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = cli.main(arguments, prog_name="python -m reproduce", standalone_mode=False, obj=benchmarks)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.MissingParameter) and error.ctx is not None:
            message += f" See '{error.ctx.command_path} --help'."
        return _complain(message, error.exit_code)
    except Error as error:
        return _complain(str(error), error.exit_code)
    except ModuleNotFoundError as error:  # a package that only some commands need
        return _complain(f"{error.name} is not installed: run 'make setup', or 'pip install {error.name}'", 1)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    click.echo(f"reproduce: {' '.join(message.split())}", err=True)
    return code
