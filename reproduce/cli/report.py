"""Offer `python -m reproduce report`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import FILE, PATH
from reproduce.records.places import OUT, RESULTS, RUNS
from reproduce.records.record import write_atomically


@click.command()
@click.option("--results", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
              help="Folder that holds the folders paper, predicted and measured. Default: results, and all runs in "
              "runs.")  # fmt: skip
@click.option("--out", type=FILE, metavar="FILE", help="Where to write it. Default: report.html in DIR, "
              "in a checkout's results, or here.")  # fmt: skip
@click.option("--trace", "traces", type=PATH, multiple=True, metavar="FILE", help="Timeline of measured steps to "
              "draw, as run --trace or torchgpipe.timeline writes it. May be given more than once.")  # fmt: skip
def report(results: Path | None, out: Path | None, traces: tuple[Path, ...]) -> None:
    """Write a page with all numbers, figures and machines.

    It shows published, predicted, emulated and measured numbers beside each other.
    """
    from reproduce.report.page import page
    from reproduce.report.subjects import FOLDERS, load_folders
    from reproduce.report.trace import read_trace

    folder = results or RESULTS
    records = load_folders(*(folder / name for name in FOLDERS), *([] if results else [RUNS]))
    if not records:
        raise click.UsageError(f"--results {folder}: no record (*.json) in its folders {', '.join(FOLDERS)}")
    path = out or (results or OUT) / "report.html"
    write_atomically(path, page(records, [each for trace in traces for each in read_trace(trace)]))
    click.echo(f"written: {path}")
