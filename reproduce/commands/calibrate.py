"""`python -m reproduce calibrate`: describe this machine's devices; say how well predictions fit measurements here."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import click

from reproduce.calibrate import calibrate as measure
from reproduce.calibrate import written
from reproduce.devices import find_devices
from reproduce.layout import Table
from reproduce.machine import load_average, machine, versions
from reproduce.record import Record, Result, save, write_atomically
from reproduce.recorder import prepare_folder
from reproduce.validate import Validated, cases, validate

__all__ = ["calibrate", "validation_table"]


@click.command()
@click.option("--on", type=click.Choice(["cpu", "cuda"]), help="Kind of devices. Default: CUDA if there is any.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many devices. Default: all.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("this-machine.json"),
    show_default=True,
    metavar="FILE",
    help="Where to put the description; give it to predict and plan as --hardware FILE.",
)
@click.option(
    "--validate",
    "validation",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also predict and measure steps on two CPU devices, and keep that record in FILE.",
)
def calibrate(on: str | None, devices: int | None, out: Path, validation: Path | None) -> None:
    """Measure a description of this machine's devices. Run it while nothing else runs."""
    for path in (out, validation):
        if path is not None and path.suffix != ".json":
            raise click.BadParameter(f"{path}: a description's or record's name ends in .json")
    prepare_folder(out.parent)
    found = find_devices(on, devices)
    with found.in_use():
        description = measure(found, out.stem)
    write_atomically(out, written(description))
    click.echo(f"written: {out}; use it as --hardware {out}")
    if validation is None:
        return

    prepare_folder(validation.parent)
    two = find_devices("cpu", 2)
    results: list[Validated] = []
    with two.in_use():
        for case in cases():
            results.append(validate(case))
            click.echo(f"{case.name}: predicted {results[-1].predicted:.3f} s, measured {results[-1].measured:.3f} s")
            save(_record(results), validation)  # nothing that is finished is lost
    click.echo(f"\n{validation_table(_record(results)).text()}\n\nwritten: {validation}")


def _record(results: list[Validated]) -> Record:
    here = machine()
    facts = {"cpu": here.cpu, "cores": here.cores, "load": load_average()}
    return Record(
        name="validation",
        title="Predicted and measured steps on two CPU devices",
        kind="measured",
        unit={"predicted": "s", "measured": "s"},
        hardware=facts,
        software=dict(versions()),
        results=[
            Result(
                experiment="validation",
                row=found.case.name,
                status="measured",
                device="cpu",
                config={"balance": list(found.case.setup.balance), "batch_size": found.case.setup.batch_size},
                values={"predicted": found.predicted, "measured": found.measured},
            )
            for found in results
        ],
    )


def validation_table(record: Record) -> Table:
    """Return the table of a validation's record."""
    errors = [r.values["predicted"] / r.values["measured"] - 1 for r in record.results]
    rows = [
        [r.row, f"{r.values['predicted'] * 1e3:.0f}", f"{r.values['measured'] * 1e3:.0f}", f"{error:+.0%}"]
        for r, error in zip(record.results, errors, strict=True)
    ]
    facts = record.hardware or {}
    notes = [
        f"median error {median(map(abs, errors)):.1%} of {len(rows)} configurations",
        "predicted: layers timed one by one, then replayed; measured: the median of steps after a warm-up",
        f"{facts.get('cpu')}, {facts.get('cores')} cores, torch {(record.software or {}).get('torch')}",
    ]
    return Table(record.title, ["configuration", "predicted\nms", "measured\nms", "error"], rows, notes)
