"""Offer `python -m reproduce report`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.commands import need
from reproduce.machine import ROOT
from reproduce.record import write_atomically

__all__ = ["report"]

RESULTS = ROOT / "results"


@click.command()
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=RESULTS,
    metavar="DIR",
    help="Folder that holds the folders paper, predicted and measured. Default: results.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Default: DIR/report.html."
)
def report(results: Path, out: Path | None) -> None:
    """Write one page to look at: published, predicted and measured numbers, figures and machines."""
    need("scipy", "matplotlib")
    from reproduce.report.gather import FOLDERS, load_folder
    from reproduce.report.page import page

    records = load_folder(results)
    if not records:
        raise click.UsageError(f"--results {results}: no record (*.json) in its folders {', '.join(FOLDERS)}")
    path = out or results / "report.html"
    write_atomically(path, page(records))
    click.echo(f"written: {path}")
