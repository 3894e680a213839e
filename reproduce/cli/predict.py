"""Offer `python -m reproduce predict`: published tables, predicted without running anything."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import PATH, known, parsed
from reproduce.predict.rows import predict_table, predictable
from reproduce.records.places import RESULTS
from reproduce.records.record import save
from reproduce.run.recorder import prepare_folder
from reproduce.tables.all import tables
from reproduce.tables.layout import many
from torchgpipe.plan.hardware import Hardware, hardware_names, load_hardware

ALL = "all"


@click.command()
@click.argument("experiments", nargs=-1, required=True,
                callback=known("experiment that can be predicted", lambda: [*predictable(), ALL]))  # fmt: skip
@click.option("--hardware", default="p40x8", show_default=True, metavar="NAME|FILE", callback=parsed(load_hardware),
              help=f"A shipped description ({', '.join(hardware_names())}) or the path of one (.json).")  # fmt: skip
@click.option("--out", type=PATH, default=RESULTS / "predicted", metavar="DIR", help="Where to put the records. "
              "Default: results/predicted.")  # fmt: skip
def predict(experiments: list[str], hardware: Hardware, out: Path) -> None:
    """Predict published tables without running anything.

    EXPERIMENTS, or all, are predicted at scale paper. No GPU is needed.
    """
    prepare_folder(out)
    names = list(predictable()) if ALL in experiments else experiments
    for name in names:
        record = predict_table(name, hardware)
        for table in tables(record):
            click.echo(f"\n{table.text()}")
        save(record, out / f"{record.name}.json")
    click.echo(f"\nwritten: {many(len(names), 'record')} to {out}")
