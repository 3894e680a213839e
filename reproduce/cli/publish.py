"""Offer `python -m reproduce publish`."""

from __future__ import annotations

import re

import click
from msgspec.structs import replace

from reproduce.cli.shared import shown
from reproduce.records.places import MEASURED, find_record, need_checkout
from reproduce.records.record import Record, Run, load, save, write_atomically
from reproduce.tables.all import document


@click.command()
@click.argument("record")
@click.option("--force", is_flag=True, help="Publish it in spite of the reasons against it.")
def publish(record: str, force: bool) -> None:
    """Copy a run into results/measured, to be committed.

    RECORD is a file or the name of a run; its tables are copied, too. Its name there is made of its experiments, scale,
    devices and time. Of absolute paths in its command only the last part is kept. A run is refused if it was not
    finished, if it ran changed or unknown source code, or if it would replace another of the same name.
    """
    need_checkout("publish")
    found = load(find_record(record))
    if found.kind != "measured" or found.run is None:
        raise click.UsageError(f"{record}: was not measured by this program, so it is not to be published as measured")
    path = MEASURED / f"{published_name(found, found.run)}.json"
    against = []
    if found.run.state != "finished":
        against.append(f"the run was not finished ({found.run.state})")
    if found.run.git is None:
        against.append("it is not known which git revision ran")
    elif found.run.git.dirty:
        against.append("the source code had changes that are in no commit")
    if path.exists():
        against.append(f"{shown(path)} is there already")
    if against and not force:
        raise click.ClickException(f"{record}: {'; '.join(against)}; run it again, or use --force")
    # Folders of the machine that ran it are nobody's business.
    command = [re.sub(r"^(--[a-z]+=)?/.*/(?=.)", r"\1", word) for word in found.run.command]
    renamed = replace(found, name=path.stem, run=replace(found.run, command=command))
    save(renamed, path)
    write_atomically(path.with_suffix(".md"), document(renamed))
    click.echo(f"published: {shown(path)}; 'make results' updates the tables that show it")


def published_name(record: Record, run: Run) -> str:
    """Return experiments, scale, devices and time, as in `unet-speed_unet-memory-paper-8xtesla-p40-20200421T1002`."""
    machine = {"cpu": run.machine.cpu, "meta": "meta"}.get(run.device) or run.machine.gpus[0].name
    plain = re.sub(r"\(\w+\)|\bCPU\b|@.*", " ", machine)  # Intel(R) Xeon(R) CPU @ 2.00GHz
    name = "-".join(re.findall(r"[a-z0-9.]+", plain.lower()))
    experiments = "_".join(dict.fromkeys(result.experiment for result in record.results))
    time = re.sub("[-:]", "", run.started[:16])
    return f"{experiments}-{record.scale}-{run.devices}x{name}-{time}"
