"""Offer `python -m reproduce calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.cli.shared import FILE, devices, on
from reproduce.machine.devices import find_devices
from reproduce.predict.calibrate import calibrate as measure
from reproduce.predict.calibrate import written
from reproduce.records.record import write_atomically
from reproduce.run.recorder import prepare_folder


@click.command()
@on("cpu", "cuda")
@devices
@click.option("--out", type=FILE, default="this-machine.json", show_default=True, help="Where to put the description.")
def calibrate(on: str | None, devices: int | None, out: Path) -> None:
    """Measure this machine, for --hardware of predict and plan.

    It writes a hardware description. Run it while nothing else runs.
    """
    if out.suffix != ".json":
        raise click.BadParameter(f"{out}: a description's name ends in .json", param_hint="--out")
    prepare_folder(out.parent)
    found = find_devices(on, devices)
    with found.in_use():
        description = measure(found, out.stem)
    write_atomically(out, written(description))
    click.echo(f"written: {out}; use it as --hardware {out}")
