"""Offer `python -m reproduce regression`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from reproduce.cli.shared import COUNT, FILE, alpha, examples, style, threshold
from reproduce.records.places import need_checkout


@click.command(epilog=examples("regression --base HEAD", "regression --base HEAD --case U-Net --restarts 10"))
@click.option("--base", metavar="REV", help="The git revision to compare with.")
@click.option("--head", metavar="REV", help="The git revision to judge. Default: the working tree.")
@click.option("--bisect", nargs=2, metavar="GOOD BAD",
              help="Instead: name the first commit that is slower than GOOD.")  # fmt: skip
@click.option("--case", "wanted", multiple=True, metavar="TEXT",
              help="Only cases with TEXT in their names; may be repeated.")  # fmt: skip
@click.option("--restarts", type=COUNT, metavar="N", default=20, show_default=True,
              help="How often both sides are started anew.")  # fmt: skip
@click.option("--rounds", type=COUNT, metavar="N", default=8, show_default=True,
              help="Pairs of samples of each case per restart.")  # fmt: skip
@click.option("--clock", type=click.Choice(["cpu", "wall"]), default="cpu", show_default=True,
              help="CPU time, or the wall clock, which also sees waiting.")  # fmt: skip
@threshold(0.02)
@alpha("in any of the cases")
@style
@click.option("--markdown", type=FILE, metavar="FILE", help="Also write the table to FILE.")
@click.option("--slow-down", type=click.FloatRange(min=0), default=0.0, metavar="SHARE",
              help="Delay the head's steps so much, to see whether it is noticed.")  # fmt: skip
def regression(
    base: str | None, head: str | None, bisect: tuple[str, str] | None, wanted: Sequence[str], threshold: float,
    alpha: float, style: str, markdown: Path | None, **measured: Any,
) -> None:  # fmt: skip
    """Say whether a change slowed training down.

    Steps of two revisions are timed in turn, in one job. The exit code is 1 if a case is slower for real:
    significantly, and by more than the threshold. With --bisect, it is 0 if a slower commit was found.
    """
    need_checkout("regression")
    if bool(base) == bool(bisect) or (bisect and (head or markdown)):
        raise click.UsageError("give --base REV, or --bisect GOOD BAD, which takes no --head and no --markdown")
    from reproduce.numbers.significance import Rule
    from reproduce.records.record import write_atomically
    from reproduce.regression.bisect import bisected
    from reproduce.regression.job import Settings
    from reproduce.regression.main import answer, choose_cases
    from reproduce.run.progress import Progress
    from reproduce.run.recorder import prepare_folder

    if markdown is not None:
        prepare_folder(markdown.absolute().parent, "--markdown")
    settings, rule = Settings(choose_cases(wanted), **measured), Rule(alpha, threshold)
    progress = Progress()

    def done(restart: int) -> None:
        progress.show(f"restart {restart} of {settings.restarts} done")

    try:
        if bisect is not None:
            culprit = bisected(*bisect, settings, rule, done, progress.say)
        else:
            assert base is not None
            text, complaint = answer(base, head, settings, rule, done)
    finally:
        progress.clear()
    if bisect is not None:
        return click.echo(f"the first commit that is slower than {bisect[0]}: {culprit}")
    click.echo(text(style), nl=False)
    if markdown is not None:
        write_atomically(markdown, text("markdown"))
    if complaint is not None:
        raise click.ClickException(complaint)
