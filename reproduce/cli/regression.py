"""Define the command `regression`, which says whether a change made the code slower or worse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from reproduce.cli.shared import COUNT, FILE, FiniteRange, alpha, command, seed, style, threshold
from reproduce.error import Error
from reproduce.records.places import need_checkout

OWN = "--package mypackage --cases bench/cases.py"


of_package = click.option(
    "--package",
    metavar="NAME",
    help="Measure this package; needed in other repositories.",
)
by_cases = click.option(
    "--cases", metavar="FILE", type=FILE, help="The Python file with the package's cases."
)
built_by = click.option(
    "--build", metavar="COMMAND", help="Make it importable in a copy, or in src there."
)


def project_of(package: str | None, cases: Path | None, build: str | None) -> Any:
    """Return the package to measure, as the options describe it.

    By default, it is torchgpipe. Then the current folder must be in the checkout from which this
    program runs.

    Raises:
        Error: No package is named, and this program is installed as a package, or the current
            folder is outside of its checkout.
        click.UsageError: Only some of the options that a package needs are given, or the file of
            cases does not exist.
    """
    from reproduce.regression.trees import TORCHGPIPE, Project

    if package is None and cases is None and build is None:
        need_checkout("regression", f", or name your own project: {OWN}")
        if not Path.cwd().resolve().is_relative_to(TORCHGPIPE.root.resolve()):
            raise Error(
                f"{Path.cwd()} is not in torchgpipe's repository, {TORCHGPIPE.root}: go there to "
                f"judge torchgpipe, or name the package to judge, as in {OWN}"
            )
        return TORCHGPIPE
    if cases is not None and not cases.is_file():
        raise click.BadParameter(f"{cases}: there is no such file", param_hint="--cases")
    names = (package or "").split(".")
    if cases is None or not all(map(str.isidentifier, names)):
        raise click.UsageError(
            f"name both a package and a file of cases, as in {OWN}; got the package {package} and "
            f"the file {cases}"
        )
    return Project(str(package), cases.absolute(), Path.cwd(), build)


@command(
    "regression --base HEAD --also v0.1.0",
    "regression --base main --package mine --cases mine.py",
)
@click.option("--base", metavar="REV", help="The git revision to compare with.")
@click.option(
    "--also",
    metavar="REV",
    help="A second revision to compare with, such as the last release.",
)
@click.option("--head", metavar="REV", help="The revision to judge. Default: the working tree.")
@click.option(
    "--bisect",
    nargs=2,
    metavar="GOOD BAD",
    help="Instead: name the first commit slower than GOOD.",
)
@of_package
@by_cases
@built_by
@click.option(
    "--case",
    "wanted",
    multiple=True,
    metavar="TEXT",
    help="Only times, of cases with TEXT in the name; repeatable.",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="NAME",
    help="Only this gate: counts, meeting or times; repeatable.",
)
@click.option(
    "--restarts",
    type=COUNT,
    metavar="N",
    default=20,
    show_default=True,
    help="How often both sides are started anew.",
)
@click.option(
    "--rounds",
    type=COUNT,
    metavar="N",
    default=8,
    show_default=True,
    help="Pairs of samples of each case per restart.",
)
@click.option(
    "--clock",
    type=click.Choice(["cpu", "wall"]),
    default=None,
    help="For all cases: CPU time on one core, wall clock on two. Default: each has its own.",
)
@seed
@threshold(0.02)
@click.option(
    "--also-threshold",
    type=FiniteRange(min=0),
    metavar="SHARE",
    default=0.1,
    show_default=True,
    help="The same, beside the revision of --also.",
)
@alpha("in any of the cases")
@style
@click.option(
    "--out",
    type=FILE,
    metavar="FILE",
    help="Also write the verdict and the table to FILE, in Markdown.",
)
@click.option(
    "--slow-down",
    type=FiniteRange(min=0),
    default=0.0,
    metavar="SHARE",
    help="Delay the head's steps, to see if it is noticed.",
)
def regression(  # noqa: PLR0913 - click passes each option
    base: str | None,
    head: str | None,
    also: str | None,
    bisect: tuple[str, str] | None,
    package: str | None,
    cases: Path | None,
    build: str | None,
    wanted: Sequence[str],
    gates: Sequence[str],
    threshold: float,
    also_threshold: float,
    alpha: float,
    style: str,
    out: Path | None,
    **measured: Any,
) -> None:
    """Say whether a change made the code worse.

    There are three checks, called gates. "counts" compares how many operations a training step
    does, and the order of its tasks. "meeting" checks whether tasks run at the same time. "times"
    times several cases (such as a training step of U-Net) with the code of two git revisions,
    alternately. A package other than torchgpipe has only "times".

    The exit code is 0 if no gate finds anything worse, 1 if a gate does, and 2 if the measurements
    cannot tell. A slow-down counts only if it is statistically significant, and larger than the
    threshold. With --bisect, the exit code is 0 if a slower commit was found.
    """
    if bool(base) == bool(bisect) or (bisect and (head or also or gates or out)):
        raise click.UsageError(
            "give either --base REV, or --bisect GOOD BAD without --head, --also, --gate and --out"
        )
    from reproduce.records.record import write_atomically
    from reproduce.regression.bisect import bisected
    from reproduce.regression.job import Settings
    from reproduce.regression.judge import Limits
    from reproduce.regression.main import Asked, answer, choose_cases, choose_gates
    from reproduce.run.progress import Progress
    from reproduce.run.recorder import prepare_folder

    project = project_of(package, cases, build)
    if out is not None:
        prepare_folder(out.absolute().parent, "--out")
    modules, timed = choose_gates(project, gates, wanted)
    if measured["slow_down"] and not timed:
        raise click.UsageError(
            "--slow-down delays what is timed, but the gates that --gate chooses time nothing: add "
            "--gate times, or leave --slow-down out"
        )
    chosen = choose_cases(project, wanted) if timed else {}
    settings = Settings(chosen, project=project, **measured)
    limits = Limits(alpha, threshold, also_threshold)
    progress = Progress()
    try:
        if bisect is not None:
            culprit = bisected(bisect, settings, limits, progress.show, progress.say)
        else:
            asked = Asked(str(base), head, also)
            report, wrong = answer(asked, settings, limits, progress.show, modules)
    finally:
        progress.clear()
    if bisect is not None:
        click.echo(f"the first commit that is slower than {bisect[0]}: {culprit}")
        return
    click.echo(report.text(style), nl=False)
    if out is not None:
        write_atomically(out, report.text("markdown"))
    if wrong is None:
        return
    if style in ("csv", "json"):
        raise wrong
    # The text ends with the verdict, so that it is not repeated on stderr.
    click.get_current_context().exit(wrong.exit_code)
