"""Offer `python -m reproduce report`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import need
from reproduce.machine.description import ROOT
from reproduce.records.record import write_atomically

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
@click.option(
    "--trace",
    "traces",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Timeline of a measured step to draw, as run --trace writes it. May be given again.",
)
def report(results: Path, out: Path | None, traces: tuple[Path, ...]) -> None:
    """Write one page to look at: published, predicted and measured numbers, figures and machines."""
    need("scipy", "matplotlib")
    from reproduce.report.gather import FOLDERS, load_folder
    from reproduce.report.page import page
    from reproduce.report.trace import read_trace

    records = load_folder(results)
    if not records:
        raise click.UsageError(f"--results {results}: no record (*.json) in its folders {', '.join(FOLDERS)}")
    path = out or results / "report.html"
    write_atomically(path, page(records, [read_trace(trace) for trace in traces]))
    click.echo(f"written: {path}")
