"""`python -m reproduce calibrate`: describe this machine's devices."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.machine.devices import find_devices
from reproduce.predict.calibrate import calibrate as measure
from reproduce.predict.calibrate import written
from reproduce.records.record import write_atomically
from reproduce.run.recorder import prepare_folder


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
def calibrate(on: str | None, devices: int | None, out: Path) -> None:
    """Measure a description of this machine's devices. Run it while nothing else runs."""
    if out.suffix != ".json":
        raise click.BadParameter(f"{out}: a description's name ends in .json")
    prepare_folder(out.parent)
    found = find_devices(on, devices)
    with found.in_use():
        description = measure(found, out.stem)
    write_atomically(out, written(description))
    click.echo(f"written: {out}; use it as --hardware {out}")
