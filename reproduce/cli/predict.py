"""Offer `python -m reproduce predict`: published tables, predicted without running anything."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec.structs import replace

from reproduce.cli.shared import PATH, autocast, fp32_precision, hardware, known, numbers
from reproduce.machine.devices import find_devices
from reproduce.predict.rows import predict_run, predict_table, predictable
from reproduce.records.places import OUT, find_record
from reproduce.records.record import load, save
from reproduce.run.recorder import prepare_folder
from reproduce.tables.all import tables
from reproduce.tables.layout import many
from reproduce.tables.predicted import beside_emulated
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.planner import HERE

ALL = "all"


@click.command()
@click.argument(
    "experiments", nargs=-1, callback=known("experiment that can be predicted", lambda: [*predictable(), ALL])
)
@click.option("--run", "run", metavar="RECORD", help="Show the emulated rows of this run beside their predictions: a "
              "file, or its name.")  # fmt: skip
@hardware(f"or, with --run, {HERE}: time the run's models")
@autocast
@fp32_precision
@click.option("--out", type=PATH, metavar="DIR", help="Where to put the records of published tables. "
              "Default: results/predicted in a checkout, else predicted.")  # fmt: skip
def predict(
    experiments: list[str],
    run: str | None,
    hardware: Hardware | None,
    autocast: str | None,
    fp32_precision: str | None,
    out: Path | None,
) -> None:
    """Predict published tables without running anything.

    EXPERIMENTS, or all, are predicted at scale paper. No GPU is needed.
    """
    if bool(experiments) == (run is not None):
        raise click.UsageError("name either experiments, or a run by --run")
    if run is not None:
        if out is not None:
            raise click.UsageError("--out is for published tables: with --run nothing is written")
        if autocast or fp32_precision:
            raise click.UsageError("--autocast, --fp32-precision: a run is predicted as it was run, in float32")
        emulated = load(find_record(run))
        if not any(result.status == "emulated" for result in emulated.results):
            raise click.UsageError(f"--run {run}: it has no emulated rows")
        found = find_devices(None, None)
        with found.in_use():
            predicted = predict_run(emulated, hardware or found.first(1)[0])
        for table in beside_emulated(emulated, predicted):
            click.echo(f"\n{table.text()}")
        return

    if hardware is None:
        raise click.BadParameter(
            "the papers' tables are predicted from a description: name one. On this machine, python -m reproduce plan "
            f"MODEL --hardware {HERE} times a model, and predict --run RUN --hardware {HERE} those of a run",
            param_hint=f"--hardware {HERE}",
        )
    other = list(filter(None, (autocast and f"autocast-{autocast}", fp32_precision)))
    if other and out is None:
        raise click.UsageError(
            "--autocast, --fp32-precision: name a folder by --out; results/predicted is as published"
        )
    out = out or OUT / "predicted"
    prepare_folder(out)
    names = list(predictable()) if ALL in experiments else experiments
    for name in names:
        with numbers(fp32_precision, autocast):
            record = predict_table(name, hardware)
        if other:
            record = replace(record, name="-".join([record.name, *other]), title=", ".join([record.title, *other]))
        for table in tables(record):
            click.echo(f"\n{table.text()}")
        save(record, out / f"{record.name}.json")
    click.echo(f"\nwritten: {many(len(names), 'record')} to {out}")
