"""`python -m reproduce predict EXPERIMENT… --hardware NAME`: published tables, predicted without running anything."""

from __future__ import annotations

from pathlib import Path

import click

from reproduce.experiments.choose import suggestion
from reproduce.predict.rows import predict_table, predictable
from reproduce.records.places import RESULTS
from reproduce.records.record import save
from reproduce.run.recorder import prepare_folder
from reproduce.tables.all import tables
from reproduce.tables.layout import many
from torchgpipe.plan.hardware import Hardware, hardware_names, load_hardware

PREDICTED = RESULTS / "predicted"


def hardware_by_name(_: click.Context, __: click.Parameter, name: str | None) -> Hardware | None:
    """Return the description of that name, or in that file."""
    try:
        return None if name is None else load_hardware(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def experiments_by_name(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[str]:
    """Return the names that can be predicted, each once; `all` stands for every one."""
    known = predictable()
    for name in names:
        if name not in known and name != "all":
            meant = suggestion(name, [*known, "all"])
            raise click.BadParameter(f"no experiment that can be predicted is called {name!r}; {meant}")
    return list(known) if "all" in names else list(dict.fromkeys(names))


@click.command()
@click.argument("experiments", nargs=-1, required=True, callback=experiments_by_name)
@click.option(
    "--hardware",
    default="p40x8",
    show_default=True,
    callback=hardware_by_name,
    metavar="NAME|FILE",
    help=f"A shipped description ({', '.join(hardware_names())}) or the path of one (.json).",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=PREDICTED,
    metavar="DIR",
    help="Where to put the records. Default: results/predicted.",
)
def predict(experiments: list[str], hardware: Hardware, out: Path) -> None:
    """Predict the published tables of EXPERIMENTS (or: all) at scale paper, on any machine and without a GPU."""
    prepare_folder(out)
    written = []
    for experiment in experiments:
        record = predict_table(experiment, hardware)
        for table in tables(record):
            click.echo(f"\n{table.text()}")
        path = out / f"{record.name}.json"
        save(record, path)
        written.append(path)
    click.echo(f"\nwritten: {many(len(written), 'record')} to {out}")
