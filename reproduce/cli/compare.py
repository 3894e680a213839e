"""Offer `python -m reproduce compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from reproduce.cli.shared import need

__all__ = ["compare"]


def _fields(_: click.Context, __: click.Parameter, names: str | None) -> list[str]:
    return names.split(",") if names else []


@click.command()
@click.argument("sides", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--metric", metavar="NAME", help="throughput, speedup, time, memory, reserved or any other value's name. "
              "Default: the first of them that two sides share.")  # fmt: skip
@click.option("--filter", "filters", multiple=True, metavar="FIELD=VALUE[,VALUE]", help="Compare only such rows, "
              "as in --filter n=2,4. May be given again.")  # fmt: skip
@click.option("--row", "down", metavar="FIELD[,FIELD]", callback=_fields, help="With --col: make a grid of ratios, a "
              "line for each value of these fields.")  # fmt: skip
@click.option("--col", "across", metavar="FIELD[,FIELD]", callback=_fields, help="The grid's columns, as in --row n "
              "--col m.")  # fmt: skip
@click.option("--threshold", type=click.FloatRange(min=0), default=0.05, show_default=True,
              help="Least relative difference that matters.")  # fmt: skip
@click.option("--alpha", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.01, show_default=True,
              help="Risk of calling noise significant, in each row.")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "markdown", "csv", "json"]), default="text")
@click.option("--force", is_flag=True, help="Compare absolute numbers even of different machines.")
@click.option("--fail-on-regression", is_flag=True, help="Exit with 1 where a side is worse than A, or none compares.")
def compare(sides: Sequence[str], fail_on_regression: bool, **options: Any) -> None:
    """Compare results: every further side with A, row by row.

    A side is a record, a folder of records, a JSON file of pytest-benchmark, or a git revision that holds records in
    results/measured (REVISION, or REVISION:PATH for another place).
    """
    if not 2 <= len(sides) <= 26:
        raise click.UsageError(f"compare at least two sides, and at most 26; given: {len(sides)}")
    if bool(options["down"]) != bool(options["across"]):
        raise click.UsageError("--row and --col go together, as in --row n --col m")
    if options["down"] and options["style"] not in ("text", "markdown"):
        raise click.UsageError(f"--row and --col make a grid for --format text or markdown, not {options['style']}")
    need("scipy")
    from reproduce.tables.compare import compared

    text, complaint = compared(sides, **options)
    click.echo(text, nl=False)
    if fail_on_regression and complaint is not None:
        raise click.ClickException(complaint)
