"""Define the command `init-ci`, which writes a CI workflow for the user's repository.

For each pull request, the workflow runs the command `regression`, which says whether the pull
request makes the code slower or worse in another way.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from reproduce.cli.regression import OWN, built_by, by_cases, of_package, project_of
from reproduce.cli.shared import command, shown
from reproduce.error import Error
from reproduce.machine.git import git
from reproduce.machine.origin import (
    PACKAGE,
    check_repository,
    is_folder,
    own_address,
    pip_address,
)

WORKFLOW = Path(".github/workflows/regression.yml")
ADDRESS = "https://HOST/OWNER/REPOSITORY@TAG"
INSTALL = "python -m pip install"
# The variable of the workflow that has the address of this program.
OF_PROGRAM = f"'{PACKAGE}[reproduce] @ '\"$REPRODUCE\""


@command(f"init-ci {OWN}", "init-ci --package mine --cases mine.py --build make", name="init-ci")
@of_package
@by_cases
@built_by
@click.option(
    "--from",
    "address",
    metavar="ADDRESS",
    help="The git repository that CI installs this program from, as URL or URL@REVISION. "
    "Default: where it was installed from, or origin of its checkout.",
)
@click.option(
    "--set-up",
    metavar="COMMAND",
    help="Installs this program, and what the package needs. Default: by pip, from ADDRESS and "
    "from the repository.",
)
def init_ci(
    package: str | None,
    cases: Path | None,
    build: str | None,
    address: str | None,
    set_up: str | None,
) -> None:
    """Write a CI workflow that judges pull requests.

    For each pull request, the workflow runs the command regression, which says whether the code
    becomes slower or worse in another way. Before the workflow is written, each case (a piece of
    code to time) is run once on this machine. If a case fails, nothing is written.
    """
    import jinja2

    from reproduce.records.record import write_atomically
    from reproduce.run.recorder import prepare_folder

    if WORKFLOW.exists():
        raise Error(f"{WORKFLOW} exists already: change this file by hand, or remove it first")
    if address is not None and (package is None or set_up is not None):
        raise click.UsageError(
            "--from is the address from which CI installs this program: use it only together with "
            "--package, and not with --set-up, which is a command that installs this program"
        )
    project = project_of(package, cases, build)
    check_place(cases)
    program = None
    if package is not None and set_up is None:
        program = address_of_program(address)
    try_cases(project)
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
    text = template.render(
        given=shlex.join(sys.argv[1:]),
        asked=asked,
        program=program,
        set_up=set_up or default_set_up(program),
    )
    write_atomically(WORKFLOW, text)
    both = f"it and {file}" if file else "it"
    click.echo(f"wrote {WORKFLOW}: commit {both}, and every pull request is judged")


def check_place(cases: Path | None) -> None:
    """Raise `Error` if CI would not find the workflow, or the user's file with the code to time.

    The current folder must be the top folder of a git repository with a commit. If the user has
    given a file of code to time, `cases`, it must be in this repository, and git must not ignore
    it.
    """
    here = Path.cwd()
    try:
        top = Path(git(here, "rev-parse", "--show-toplevel").decode())
    except Error as error:
        raise Error(f"init-ci: {here} is not in a git repository ({error})") from None
    if top != here.resolve():
        raise Error(f"init-ci: run this command in the top folder of the repository, {top}")
    try:
        git(here, "rev-parse", "--verify", "HEAD")
    except Error:
        raise Error(f"init-ci: {here} has no commit yet: commit the package first") from None
    if cases is None:
        return
    if not cases.resolve().is_relative_to(top):
        raise Error(f"--cases {cases}: CI has only the files in the repository; move it there")
    if git(here, "ls-files", "--others", "--ignored", "--exclude-standard", "--", str(cases)):
        raise Error(
            f"--cases {cases}: git ignores this file, so CI would not have it; "
            "move the file, or change .gitignore"
        )


def address_of_program(given: str | None) -> str:
    """Return the address from which CI installs this program, `reproduce`, in the form for pip.

    Args:
        given: The address that the user gave. If it is None, use the address from which this
            program was installed, or that of its checkout's remote repository.

    Raises:
        Error: No address is known, or git cannot read the repository at the address.
    """
    if given is None:
        try:
            address = own_address()
        except Error as error:
            raise Error(
                f"init-ci: {error}, so name the git repository from which CI installs this "
                f"program, as in --from {ADDRESS}"
            ) from None
    else:
        if not re.fullmatch(r"[\w.:/@~+%-]+", given):
            raise click.BadParameter(f"{given}: give {ADDRESS}", param_hint="--from")
        if is_folder(given):
            raise click.BadParameter(
                f"{given}: CI cannot install this program from a folder of this machine: "
                f"give an address such as {ADDRESS}",
                param_hint="--from",
            )
        address = pip_address(given)
    try:
        check_repository(address)
    except Error as error:
        raise Error(f"--from {address}: pip could not install from there: {error}") from None
    return address


def try_cases(project: Any) -> None:
    """Run each case (a piece of code to time) once, and raise `Error` if one of them fails."""
    from reproduce.regression.timed import load
    from reproduce.regression.trial import unable

    cases = load(project.cases)
    click.echo(f"trying {', '.join(cases)}", err=True)
    broken = unable(project, cases)
    if broken:
        reasons = [f"{case} does not run ({why})" for case, why in broken.items()]
        raise Error(f"--cases {shown(project.cases)}: {'; '.join(reasons)}; nothing is written")


def default_set_up(program: str | None) -> str:
    """Return the shell command by which CI installs `reproduce` and the package to measure.

    `program` is the address of `reproduce` for pip, or None if the repository that CI measures is
    that of `reproduce` itself.
    """
    if program is None:
        return f"{INSTALL} --editable '.[test]'"
    can_install = any(Path(name).exists() for name in ("pyproject.toml", "setup.py"))
    return f"{INSTALL} {OF_PROGRAM}{' .' if can_install else ''}"
