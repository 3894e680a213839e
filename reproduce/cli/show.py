"""Offer `python -m reproduce show`."""

from __future__ import annotations

import click

from reproduce.records.places import find_record
from reproduce.records.record import load
from reproduce.tables.all import document, tables


@click.command()
@click.argument("records", nargs=-1, required=True)
@click.option("--markdown", is_flag=True, help="Write Markdown, with the circumstances of the run.")
def show(records: tuple[str, ...], markdown: bool) -> None:
    """Print the tables of records.

    RECORDS are files, or names of runs in runs or results/measured.
    """
    for name in records:
        record = load(find_record(name))
        if markdown:
            click.echo(document(record), nl=False)
        for table in [] if markdown else tables(record):
            click.echo(f"\n{table.text()}")
