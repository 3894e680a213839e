"""Define the command `init-ci`, which writes a CI workflow that runs `regression`."""

import shlex
import sys
from pathlib import Path

import click

from reproduce.cli.regression import OWN, built_by, by_cases, of_package, project_of
from reproduce.cli.shared import command, shown
from reproduce.error import Error

WORKFLOW = Path(".github/workflows/regression.yml")


@command(
    f"init-ci {OWN}",
    "init-ci --package mine --cases mine.py --build make",
    name="init-ci",
    cls=click.Command,
)
@of_package
@by_cases
@built_by
@click.option(
    "--set-up",
    metavar="COMMAND",
    default="python -m pip install 'torchgpipe-today[reproduce]' .",
    show_default=True,
    help="Installs this program, and what the package needs.",
)
@click.option("--gate", metavar="COMMAND", help="A check of your own, to be run before.")
def init_ci(
    package: str | None, cases: Path | None, build: str | None, set_up: str, gate: str | None
) -> None:
    """Write a CI workflow for pull requests."""
    import jinja2

    from reproduce.records.record import write_atomically
    from reproduce.run.recorder import prepare_folder

    project_of(package, cases, build)
    if WORKFLOW.exists():
        raise Error(f"{WORKFLOW} exists already: change it by hand, or remove it first")
    file = shown(cases) if cases else None
    asked = ""
    for option, value in {"--package": package, "--cases": file, "--build": build}.items():
        if value:
            asked += f" {option} {shlex.quote(value)}"
    workflow = Path(__file__).with_name("workflow.yml")
    template = jinja2.Template(
        workflow.read_text(),
        variable_start_string="[[",
        variable_end_string="]]",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    prepare_folder(WORKFLOW.absolute().parent, "init-ci")
    given = shlex.join(sys.argv[1:])
    write_atomically(WORKFLOW, template.render(given=given, asked=asked, set_up=set_up, gate=gate))
    click.echo(f"wrote {WORKFLOW}: commit it, and every pull request is judged")
