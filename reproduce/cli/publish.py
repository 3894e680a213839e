"""Offer `python -m reproduce publish`: a run that is good enough to be committed goes into results/measured."""

from __future__ import annotations

import re

import click
from msgspec.structs import replace

from reproduce.cli.shared import shown
from reproduce.records.places import MEASURED, find_record
from reproduce.records.record import Record, Run, load, save, write_atomically
from reproduce.tables.all import document


@click.command()
@click.argument("record")
@click.option("--force", is_flag=True, help="Publish it also where one of the reasons against it holds.")
def publish(record: str, force: bool) -> None:
    """Copy RECORD, a file or the name of a run, with its tables into results/measured, to be committed.

    Its name there is made of its experiments, scale, devices and date. A run is refused that was not finished, that ran
    changed or unknown source code, or that would replace another of the same name.
    """
    found = load(find_record(record))
    if found.kind != "measured" or found.run is None:
        raise click.UsageError(f"{record}: was not measured by this program, so it is not to be published as measured")
    path = MEASURED / f"{published_name(found, found.run)}.json"
    against = {
        f"the run was not finished ({found.run.state})": found.run.state != "finished",
        "it is not known which git revision ran": found.run.git is None,
        "the source code had changes that are in no commit": found.run.git is not None and found.run.git.dirty,
        f"{shown(path)} is there already": path.exists(),
    }
    reasons = "; ".join(reason for reason, holds in against.items() if holds)
    if reasons and not force:
        raise click.ClickException(f"{record}: {reasons}; run it again, or use --force")
    renamed = replace(found, name=path.stem)
    save(renamed, path)
    write_atomically(path.with_suffix(".md"), document(renamed))
    click.echo(f"published: {shown(path)}; 'make results' renews the tables that show it")


def published_name(record: Record, run: Run) -> str:
    """Return experiments, scale, devices and date, as in `unet-speed_unet-memory-paper-8xtesla-p40-20200421`."""
    machine = {"cpu": run.machine.cpu, "meta": "meta"}.get(run.device) or run.machine.gpus[0].name
    plain = re.sub(r"\(\w+\)|\bCPU\b|@.*", " ", machine)  # Intel(R) Xeon(R) CPU @ 2.00GHz
    name = "-".join(re.findall(r"[a-z0-9.]+", plain.lower()))
    experiments = "_".join(dict.fromkeys(result.experiment for result in record.results))
    return f"{experiments}-{record.scale}-{run.devices}x{name}-{run.started[:10].replace('-', '')}"
