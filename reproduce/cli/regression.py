"""Offer `python -m reproduce regression`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from reproduce.cli.shared import need


@click.command()
@click.option("--base", required=True, metavar="REV", help="The git revision to compare with.")
@click.option("--head", metavar="REV", help="The git revision to judge. Default: the working tree, as it is.")
@click.option("--case", "wanted", multiple=True, metavar="TEXT", help="Only cases with TEXT in their names. May be "
              "given again.")  # fmt: skip
@click.option("--restarts", type=click.IntRange(min=1), default=20, show_default=True,
              help="How often both sides are started anew: what the verdict rests on.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True,
              help="Pairs of samples of each case per restart.")  # fmt: skip
@click.option("--threshold", type=click.FloatRange(min=0), default=0.05, show_default=True,
              help="Least relative difference that matters.")  # fmt: skip
@click.option("--alpha", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.01, show_default=True,
              help="Risk of calling noise significant in any of the cases.")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "markdown", "csv", "json"]), default="text")
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the table to FILE, as Markdown.")  # fmt: skip
@click.option("--slow-down", type=click.FloatRange(min=0), default=0.0, metavar="SHARE",
              help="Plant a delay of that share of a step after each of the head's, to see it noticed.")  # fmt: skip
def regression(
    base: str,
    head: str | None,
    wanted: Sequence[str],
    restarts: int,
    rounds: int,
    threshold: float,
    alpha: float,
    style: str,
    markdown: Path | None,
    slow_down: float,
) -> None:
    """Did a change slow training down? Steps of two revisions in turn, in one job.

    Ends with 1 where a case is slower for real: significantly, and by more than the threshold.
    """
    need("scipy")
    from reproduce.numbers.significance import Rule
    from reproduce.records.record import write_atomically
    from reproduce.regression.main import Settings, answer, choose_cases
    from reproduce.run.recorder import prepare_folder

    if markdown is not None:
        prepare_folder(markdown.absolute().parent, "--markdown")

    line_open = False

    def show_progress(restart: int) -> None:
        nonlocal line_open
        if sys.stderr.isatty():
            line_open = True
            click.echo(f"\rrestart {restart} of {restarts} done", err=True, nl=False)

    try:
        settings = Settings(choose_cases(wanted), restarts, rounds, slow_down)
        found = answer(base, head, settings, Rule(alpha, threshold), show_progress)
    except KeyboardInterrupt:
        line_open = False  # click ends the line
        raise
    finally:
        if line_open:
            click.echo(err=True)
    click.echo(found.text(style), nl=False)
    if markdown is not None:
        write_atomically(markdown, found.text("markdown"))
    if found.complaint is not None:
        raise click.ClickException(found.complaint)
