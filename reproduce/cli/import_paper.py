"""Offer `python -m reproduce import-paper`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import shown
from reproduce.records.published import PAPER, import_tables
from reproduce.run.recorder import prepare_folder


@click.command("import-paper")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=PAPER, metavar="DIR", help="Default: results/paper.")
def import_paper(source: Path, out: Path) -> None:
    """Make the records of published numbers from the JSON file SOURCE, which holds the papers' tables."""
    prepare_folder(out)
    for path in import_tables(source, out):
        click.echo(shown(path))
