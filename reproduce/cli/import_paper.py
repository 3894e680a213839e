"""Offer `python -m reproduce import-paper`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import PATH, shown
from reproduce.records.places import OUT
from reproduce.records.published import import_tables
from reproduce.run.recorder import prepare_folder


@click.command("import-paper")
@click.argument("source", type=PATH)
@click.option("--out", type=PATH, default=OUT / "paper", metavar="DIR", help="Where to put them. Default: "
              "results/paper in a checkout, else paper.")  # fmt: skip
def import_paper(source: Path, out: Path) -> None:
    """Make the records of published numbers.

    SOURCE is the JSON file that holds the papers' tables.
    """
    prepare_folder(out)
    for path in import_tables(source, out):
        click.echo(shown(path))
