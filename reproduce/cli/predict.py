"""Define the command `predict`, which predicts published tables, or results of an emulated run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from reproduce.cli.plan import precision
from reproduce.cli.shared import (
    HERE,
    PATH,
    autocast,
    command,
    fp32_precision,
    hardware,
    known,
    style,
)
from reproduce.experiments import predictable
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import OUT, find_record
from reproduce.records.record import Record, load, save
from reproduce.run.recorder import prepare_folder
from reproduce.tables.layout import Table, many

ALL = "all"


# The second example must not write into results/predicted, the folder of the committed records.
@command("predict all", "predict unet-speed --hardware h100x8 --out predicted")
@click.argument(
    "experiments",
    nargs=-1,
    **known("experiment that can be predicted", lambda: [*predictable(), ALL]),
)
@click.option(
    "--run",
    "run",
    metavar="RECORD",
    help="Predict the emulated rows of this run.",
)
@hardware(f"or, with --run, {HERE}")
@autocast
@fp32_precision
@style
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Where to put the records; not with --run. Default: results/predicted in a checkout, else "
    "predicted.",
)
def predict(  # noqa: PLR0913 - click passes each option
    experiments: list[str],
    run: str | None,
    hardware: Any,
    autocast: str | None,
    fp32_precision: str | None,
    style: str,
    out: Path | None,
) -> None:
    """Predict published tables, or the emulated rows of a run.

    EXPERIMENTS are names of experiments, or "all". Their rows are predicted with the published
    sizes of models and batches. No GPU is needed.
    """
    if bool(experiments) == (run is not None):
        raise click.UsageError("name either experiments, or a run by --run")
    if run is not None:
        if out is not None:
            raise click.UsageError("--out is for published tables: --run writes no records")
        if autocast or fp32_precision:
            raise click.UsageError(
                "--autocast, --fp32-precision: leave these options out with --run, because a run "
                "is predicted in float32, the precision in which it ran"
            )
        show_run(run, hardware, style)
        return
    if hardware is None:
        raise click.BadParameter(
            "the papers' tables are predicted from a description of hardware: name a description. "
            f"To time models on this machine, use python -m reproduce plan MODEL --hardware {HERE} "
            "for one "
            f"model, or predict --run RUN --hardware {HERE} for the models of a run",
            param_hint=f"--hardware {HERE}",
        )
    if (autocast or fp32_precision) and out is None:
        raise click.UsageError(
            "--autocast, --fp32-precision: also name a folder by --out, because the default "
            "folder, results/predicted, is for predictions in the published precision"
        )
    folder = out or OUT / "predicted"
    prepare_folder(folder)
    names = list(predictable()) if ALL in experiments else experiments
    records = []
    for name in names:
        record = predict_table(name, hardware, autocast, fp32_precision)
        records.append(record)
        save(record, folder / f"{record.name}.json")
    show_records(records, style)
    click.echo(f"written: {many(len(names), 'record')} to {folder}", err=True)


def show_records(
    records: Sequence[Record], style: str, made: Sequence[Table] | None = None
) -> None:
    """Print the tables of records (files of results) in a format such as "text" or "json".

    If `made` is given, print the tables in `made` instead of the records' usual tables.
    """
    from reproduce.tables.all import written_records

    click.echo(written_records(records, style, made), nl=False)


def show_run(run: str, hardware: Any, style: str) -> None:
    """Predict the emulated rows of a run, and print emulated and predicted results side by side.

    A row is a configuration that was run.

    Args:
        run: The run's name, or the path of its record.
        hardware: The hardware for which to predict; None to time the models on this machine.
        style: The format of the output, such as "text" or "json".
    """
    from reproduce.predict.rows import predict_run
    from reproduce.tables.emulated import beside_emulated

    emulated = load(find_record(run))
    if not any(result.status == "emulated" for result in emulated.results):
        raise click.UsageError(f"--run {run}: it has no emulated rows")
    found = find_devices(None, None)
    if hardware is None and emulated.run is not None:
        if emulated.run.device == "cuda" and found.kind != "cuda":
            raise click.UsageError(
                f"--run {run}: its models ran on GPUs, which this machine does not have; give "
                "--hardware NAME"
            )
        found = find_devices(emulated.run.device, None)
        if found.kind == "cpu":
            found = Devices("cpu", 1, threads=1)  # as an emulated CPU device
    with found.in_use():
        predicted = predict_run(emulated, hardware or found.first(1)[0])
    show_records([emulated, predicted], style, beside_emulated(emulated, predicted))


def predict_table(
    experiment: str, hardware: Any, autocast: str | None, fp32_precision: str | None
) -> Record:
    """Predict the published table of an experiment; return the results as a record.

    If `autocast` or `fp32_precision` is given, it is part of the record's name and title, and of
    the name of its hardware. So tables show predictions in several precisions as different rows.
    """
    from reproduce.predict import rows

    with precision(fp32_precision, autocast):
        record = rows.predict_table(experiment, hardware)
    chosen = [f"autocast-{autocast}" if autocast else None, fp32_precision]
    added = list(filter(None, chosen))
    described = dict(record.hardware or {})
    described["name"] = ", ".join([described["name"], *added])
    name = "-".join([record.name, *added])
    title = ", ".join([record.title, *added])
    return replace(record, name=name, title=title, hardware=described)
