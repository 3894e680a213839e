"""Offer the experiments on the command line: `python -m reproduce list | run | show | render | import-paper`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from reproduce.cli.calibrate import calibrate
from reproduce.cli.compare import compare
from reproduce.cli.interrupt import interruptible
from reproduce.cli.listing import listing
from reproduce.cli.plan import plan
from reproduce.cli.predict import predict
from reproduce.cli.regression import regression
from reproduce.cli.render import render_command
from reproduce.cli.report import report
from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS, Experiment
from reproduce.experiments.choose import choose_rows
from reproduce.experiments.scale import choose_scale
from reproduce.machine.allocator import kept as freed_memory_kept
from reproduce.machine.description import ROOT
from reproduce.machine.devices import Devices, cores, find_devices
from reproduce.records.published import PAPER, import_tables, published
from reproduce.records.record import FREED_MEMORY, load, write_atomically
from reproduce.report.tracer import Tracer, matplotlib_problem
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder, new_recorder, prepare_folder
from reproduce.run.session import UNITS, Runner
from reproduce.tables.all import document, tables
from reproduce.tables.layout import many

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
MEASURED = ROOT / "results" / "measured"


def experiments_by_name(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[Experiment]:
    """Return the experiments that are called so, each once."""
    for name in names:
        if name not in EXPERIMENTS:
            close = difflib.get_close_matches(name, EXPERIMENTS, n=1)
            meant = f"did you mean {close[0]}" if close else f"there are {', '.join(EXPERIMENTS)}"
            raise click.BadParameter(f"no experiment is called {name!r}; {meant}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


@click.group()
def cli() -> None:
    """Run the papers' experiments on this machine and compare with what was published."""


@cli.command("list")
@click.option("--on", type=click.Choice(["cpu", "cuda", "meta"]), help="Kind of devices. Default: CUDA if any.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many devices. Default: all.")
def list_experiments(on: str | None, devices: int | None) -> None:
    """List every experiment, scale and row: what it needs and what it reproduces."""
    click.echo(listing(find_devices(on, devices)))


@cli.command()
@click.argument("experiments", nargs=-1, required=True, callback=experiments_by_name)
@click.option("--scale", type=click.Choice(["paper", "small"]), help="Default: the largest that this machine holds.")
@click.option(
    "--on",
    type=click.Choice(["cpu", "cuda", "meta"]),
    help="Kind of devices. Default: CUDA if there is any. Meta devices hold no data: they are for memory experiments, "
    "which count on them what the published sizes take.",
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many devices. A CPU device is an equal share of the cores. Default: all.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="K",
    help="Timed steps of each row. Default: the scale's, within its time limit.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=MEASURED,
    metavar="DIR",
    help="Where to put the record and the tables. Default: results/measured.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of parameters, data and the rows' order.")
@click.option("--row", "rows", multiple=True, metavar="NAME", help="Run this row only; may be given again.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run one more step of every speed row, and write when each of its tasks started and ended: as FILE.json "
    "for Perfetto, and as a picture, FILE.svg or .png.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="ImageNet, for accuracy: train/<class>/*.JPEG and val/<class>/*.JPEG.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    metavar="K",
    help="How often to train each row, for accuracy. Default: the scale's.",
)
@click.option("--fresh", is_flag=True, help="Start trainings anew, instead of going on from checkpoints.")
def run(
    experiments: list[Experiment],
    scale: str | None,
    on: str | None,
    devices: int | None,
    steps: int | None,
    out: Path,
    seed: int,
    rows: tuple[str, ...],
    trace: Path | None,
    data: Path | None,
    seeds: int | None,
    fresh: bool,
) -> None:
    """Run EXPERIMENTS, print their tables and keep a record of them."""
    experiments = choose_rows(experiments, rows)
    for experiment in experiments:
        published(experiment.table)  # a broken checkout should be noticed now
    found = find_devices(on, devices)
    if found.kind == "meta" and any(experiment.measures != "memory" for experiment in experiments):
        raise click.UsageError(f"--on meta is for experiments on memory: {', '.join(_on_memory())}")
    trained = [experiment for experiment in experiments if experiment.measures == "accuracy"]
    if not trained and (data is not None or seeds is not None or fresh):
        raise click.UsageError("--data, --seeds and --fresh are for experiments on accuracy: run resnet101-accuracy")
    if trained and scale is None:
        scale = "small" if data is None else "paper"
    chosen = choose_scale(experiments, found, scale)
    prepare_folder(out)
    tracer = None if trace is None else _tracer(trace, experiments, chosen, found)
    accuracy = None
    if trained:
        from reproduce.run.accuracy.run import Accuracy

        accuracy = Accuracy(out / "checkpoints", data=data, seeds=seeds, fresh=fresh)
        for experiment in trained:
            accuracy.prepare(experiment, chosen, seed)

    recorder = new_recorder(
        out,
        [experiment.name for experiment in experiments],
        title="; ".join(experiment.title for experiment in experiments),
        scale=chosen,
        unit=UNITS,
        devices=found,
        seed=seed,
        command=["python", "-m", "reproduce", *sys.argv[1:]],
        settings={
            "steps": steps,
            "seeds": seeds,
            FREED_MEMORY: "kept" if freed_memory_kept() else "as the C library does",
            **({"rows": list(rows)} if rows else {}),
            **{each.name: each.scale(chosen).settings() for each in experiments},
        },
    )
    progress = Progress()
    advice = _advice(found)
    if advice is not None:
        progress.say(advice)
    if tracer is not None and not tracer.draw:
        progress.say(str(matplotlib_problem()))
    progress.say(f"scale {chosen} on {found}; what is finished is kept in\n{_shown(recorder.path)}")
    try:
        with interruptible() as check:
            runner = Runner(
                found,
                recorder,
                progress,
                scale=chosen,
                seed=seed,
                steps=steps,
                check=check,
                trace=tracer,
                accuracy=accuracy,
            )
            recorder.save()
            for experiment in experiments:
                runner.plan(experiment)
            for experiment in experiments:
                runner.run(experiment)
                progress.clear()
                for table in tables(recorder.record, experiment.name):
                    click.echo(f"\n{table.text()}")
    except KeyboardInterrupt:
        progress.clear()
        _finish(recorder, "interrupted")
        kept = sum(result.status == "measured" for result in recorder.results.values())
        click.echo(f"interrupted; {many(kept, 'measured row')} kept in {_shown(recorder.path)}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None

    _finish(recorder, "finished")
    written = [recorder.path, recorder.path.with_suffix(".md"), *(tracer.written if tracer else [])]
    click.echo("\n".join(["\nwritten:", *map(_shown, written)]))
    failed = [result for result in recorder.results.values() if result.status == "failed"]
    if failed:
        raise click.ClickException(
            f"{many(len(failed), 'row')} failed, the first being {failed[0].row}: {failed[0].reason}"
        )
    if tracer is not None and tracer.problems:
        raise click.ClickException(f"--trace: {tracer.problems[0]}")


@cli.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="Write Markdown, with the circumstances of the run.")
def show(records: tuple[Path, ...], markdown: bool) -> None:
    """Print the tables of RECORDS."""
    for path in records:
        record = load(path)
        if markdown:
            click.echo(document(record), nl=False)
        for table in [] if markdown else tables(record):
            click.echo(f"\n{table.text()}")


@cli.command("import-paper")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=PAPER, metavar="DIR", help="Default: results/paper.")
def import_paper(source: Path, out: Path) -> None:
    """Make the records of published numbers from the JSON file SOURCE, which holds the papers' tables."""
    prepare_folder(out)
    for path in import_tables(source, out):
        click.echo(_shown(path))


cli.add_command(compare)
cli.add_command(report)
cli.add_command(regression)
cli.add_command(render_command)
cli.add_command(calibrate)
cli.add_command(plan)
cli.add_command(predict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one line on stderr."""
    try:
        code = cli.main(arguments, prog_name="python -m reproduce", standalone_mode=False)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except Error as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # who read the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _on_memory() -> list[str]:
    return [experiment.name for experiment in EXPERIMENTS.values() if experiment.measures == "memory"]


def _tracer(trace: Path, experiments: Sequence[Experiment], scale: str, devices: Devices) -> Tracer:
    """Return what writes timelines; refuse now what could not be written later."""
    timed = [experiment for experiment in experiments if experiment.measures in ("speed", "ablation")]
    if not timed:
        measures = experiments[0].measures
        raise click.UsageError(f"--trace: {measures} experiments time no step; name a speed experiment")
    if trace.is_dir():
        raise click.UsageError(f"--trace {trace}: is a folder; name a file, such as {trace / 'trace.json'}")
    prepare_folder(trace.absolute().parent, "--trace")
    rows = [row for experiment in timed for row in experiment.scale(scale).rows if row.devices <= devices.count]
    draw = matplotlib_problem() is None
    return Tracer(trace, several=len(rows) > 1, experiments=len(timed) > 1, draw=draw)


def _finish(recorder: Recorder, state: Literal["finished", "interrupted"]) -> None:
    """Write the record and its tables for the last time."""
    recorder.end(state)
    write_atomically(recorder.path.with_suffix(".md"), document(recorder.record))


def _advice(devices: Devices) -> str | None:
    """Say how pipelines can be run where one CUDA device would leave only rows without any."""
    if devices.kind != "cuda" or devices.count > 1:
        return None
    return (
        "one CUDA device runs rows of one partition only; --on cpu runs pipelines on the CPU's "
        f"{many(cores(), 'core')}, at scale small"
    )


def _complain(message: str, code: int) -> int:
    click.echo(f"reproduce: {' '.join(message.split())}", err=True)
    return code


def _shown(path: Path) -> str:
    """Return the path as one would type it here, where it lies below the current folder."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
