"""Offer `python -m reproduce compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from reproduce.cli.shared import alpha, parsed, style, threshold

fields = parsed(lambda names: names.split(",") if names else [])


@click.command()
@click.argument("sides", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--metric", metavar="NAME", help="throughput, speedup, time, memory, reserved, or any other value by its "
              "name. Default: the first of these that two sides have.")  # fmt: skip
@click.option("--filter", "filters", multiple=True, metavar="FIELD=VALUE[,VALUE]",
              help="Compare only such rows, as in --filter n=2,4. May be given more than once.")  # fmt: skip
@click.option("--row", "down", metavar="FIELD[,FIELD]", default="", callback=fields,
              help="With --col: print a grid of ratios, with a row for each value of these fields.")  # fmt: skip
@click.option("--col", "across", metavar="FIELD[,FIELD]", default="", callback=fields,
              help="The grid's columns, as in --row n --col m.")  # fmt: skip
@threshold(0.05)
@alpha("in each row")
@style
@click.option("--force", is_flag=True, help="Compare absolute numbers even of different machines.")
@click.option("--fail-on-regression", is_flag=True,
              help="Exit with 1 if a side is worse than A, or if no row can be compared.")  # fmt: skip
def compare(sides: Sequence[str], fail_on_regression: bool, **options: Any) -> None:
    """Compare results with those of A, row by row.

    A side is a record, a folder of records, a JSON file of pytest-benchmark, or a git revision that holds records in
    results/measured (REVISION, or REVISION:PATH for another place).
    """
    if not 2 <= len(sides) <= 26:
        raise click.UsageError(f"compare at least two sides, and at most 26; given: {len(sides)}")
    if bool(options["down"]) != bool(options["across"]):
        raise click.UsageError("--row and --col go together, as in --row n --col m")
    if options["down"] and options["style"] not in ("text", "markdown"):
        raise click.UsageError(f"--row and --col make a grid for --format text or markdown, not {options['style']}")
    from reproduce.tables.comparison import compared

    text, complaint = compared(sides, **options)
    click.echo(text, nl=False)
    if fail_on_regression and complaint is not None:
        raise click.ClickException(complaint)
