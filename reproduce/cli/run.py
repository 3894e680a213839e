"""Offer `python -m reproduce run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from reproduce.cli.interrupt import interruptible
from reproduce.cli.shared import shown
from reproduce.experiments import EXPERIMENTS, AccuracyScale, Experiment, Scale
from reproduce.experiments.choose import choose_rows, suggestion
from reproduce.experiments.scale import choose_scale
from reproduce.machine.allocator import kept as freed_memory_kept
from reproduce.machine.devices import Devices, cores, find_devices
from reproduce.records.places import RUNS
from reproduce.records.published import published
from reproduce.records.record import FREED_MEMORY, write_atomically
from reproduce.report.trace import Tracer, matplotlib_problem
from reproduce.run.accuracy.checkpoints import Checkpoints
from reproduce.run.accuracy.needs import AccuracyNeeds, prepare_data
from reproduce.run.experiment import plan, run_experiment
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder, new_recorder, prepare_folder
from reproduce.run.session import UNITS, Session
from reproduce.run.training import Balancer
from reproduce.tables.all import document, tables
from reproduce.tables.layout import many

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended

Chosen = list[tuple[Experiment, Scale]]


def experiments_by_name(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[Experiment]:
    """Return the experiments that are called so, each once."""
    for name in names:
        if name not in EXPERIMENTS:
            raise click.BadParameter(f"no experiment is called {name!r}; {suggestion(name, EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


@click.command()
@click.argument("experiments", nargs=-1, required=True, callback=experiments_by_name)
@click.option("--scale", type=click.Choice(["paper", "small"]), help="Default: the largest that this machine holds.")
@click.option("--on", type=click.Choice(["cpu", "cuda", "meta"]), help="Kind of devices. Default: CUDA if there is "
              "any. Meta devices hold no data: they are for memory experiments, which count on them what the published "
              "sizes take.")  # fmt: skip
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many devices. A CPU device is an equal "
              "share of the cores. Default: all.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="K", help="Timed steps of each row. Default: the scale's, "
              "within its time limit.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=RUNS, metavar="DIR", help="Where to put the record and "
              "the tables. Default: runs, which git ignores.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of parameters, data and the rows' order.")
@click.option("--row", "rows", multiple=True, metavar="NAME", help="Run this row only; may be given again.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Run one more step of every speed row, "
              "and write when each of its tasks ran: as FILE.json for Perfetto, and as a picture, FILE.svg "
              "or .png.")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="ImageNet, for accuracy: "
              "train/<class>/*.JPEG and val/<class>/*.JPEG.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), metavar="K", help="How often to train each row, for accuracy. "
              "Default: the scale's.")  # fmt: skip
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
        on_memory = [each.name for each in EXPERIMENTS.values() if each.measures == "memory"]
        raise click.UsageError(f"--on meta is for experiments on memory: {', '.join(on_memory)}")
    trained = any(experiment.measures == "accuracy" for experiment in experiments)
    if not trained and (data is not None or seeds is not None or fresh):
        raise click.UsageError("--data, --seeds and --fresh are for experiments on accuracy: run resnet101-accuracy")
    if trained and scale is None:
        scale = "small" if data is None else "paper"
    scale = choose_scale(experiments, found, scale)
    chosen = [(experiment, experiment.scale(scale)) for experiment in experiments]
    prepare_folder(out)
    tracer = None if trace is None else make_tracer(trace, chosen, found)
    accuracy: dict[str, AccuracyNeeds] = {}
    if trained:
        checkpoints = Checkpoints(out / "checkpoints", fresh=fresh)
        for experiment, at in chosen:
            if isinstance(at, AccuracyScale):
                dataset = prepare_data(experiment, at, data, seed)
                accuracy[experiment.name] = AccuracyNeeds(dataset, range(seed, seed + (seeds or at.seeds)), checkpoints)

    recorder = new_recorder(
        out,
        [experiment.name for experiment in experiments],
        title="; ".join(experiment.title for experiment in experiments),
        scale=scale,
        unit=UNITS,
        devices=found,
        seed=seed,
        command=["python", "-m", "reproduce", *sys.argv[1:]],
        settings={
            "steps": steps,
            "seeds": seeds,
            FREED_MEMORY: "kept" if freed_memory_kept() else "as the C library does",
            **({"rows": list(rows)} if rows else {}),
            **{experiment.name: at.settings() for experiment, at in chosen},
        },
    )
    progress, balancer = Progress(), Balancer(found)
    for advice in (one_gpu_advice(found), matplotlib_problem() if tracer else None):
        if advice is not None:
            progress.say(advice)
    progress.say(f"scale {scale} on {found}; what is finished is kept in\n{shown(recorder.path)}")
    try:
        with interruptible() as check:
            sessions = [
                Session(
                    experiment=experiment,
                    scale=at,
                    devices=found,
                    recorder=recorder,
                    progress=progress,
                    balancer=balancer,
                    seed=seed,
                    steps=steps,
                    check=check,
                    trace=tracer,
                    accuracy=accuracy.get(experiment.name),
                )
                for experiment, at in chosen
            ]
            recorder.save()
            for session in sessions:
                plan(session)
            for session in sessions:
                run_experiment(session)
                progress.clear()
                for table in tables(recorder.record, session.experiment.name):
                    click.echo(f"\n{table.text()}")
    except KeyboardInterrupt:
        progress.clear()
        finish(recorder, "interrupted")
        kept = sum(result.status == "measured" for result in recorder.results.values())
        click.echo(f"interrupted; {many(kept, 'measured row')} kept in {shown(recorder.path)}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None

    finish(recorder, "finished")
    written = [recorder.path, recorder.path.with_suffix(".md"), *(tracer.written if tracer else [])]
    click.echo("\n".join(["\nwritten:", *map(shown, written)]))
    failed = [result for result in recorder.results.values() if result.status == "failed"]
    if failed:
        raise click.ClickException(
            f"{many(len(failed), 'row')} failed, the first being {failed[0].row}: {failed[0].reason}"
        )
    if tracer is not None and tracer.problems:
        raise click.ClickException(f"--trace: {tracer.problems[0]}")


def make_tracer(trace: Path, chosen: Chosen, devices: Devices) -> Tracer:
    """Return what writes timelines; refuse now what could not be written later."""
    timed = [(experiment, at) for experiment, at in chosen if experiment.measures in ("speed", "ablation")]
    if not timed:
        measures = chosen[0][0].measures
        raise click.UsageError(f"--trace: {measures} experiments time no step; name a speed experiment")
    if trace.is_dir():
        raise click.UsageError(f"--trace {trace}: is a folder; name a file, such as {trace / 'trace.json'}")
    prepare_folder(trace.absolute().parent, "--trace")
    several = sum(row.devices <= devices.count for _, at in timed for row in at.rows) > 1
    return Tracer(trace, several=several, experiments=len(timed) > 1, draw=matplotlib_problem() is None)


def finish(recorder: Recorder, state: Literal["finished", "interrupted"]) -> None:
    """Write the record and its tables for the last time."""
    recorder.end(state)
    write_atomically(recorder.path.with_suffix(".md"), document(recorder.record))


def one_gpu_advice(devices: Devices) -> str | None:
    """Say how pipelines can be run where one CUDA device would leave only rows without any."""
    if devices.kind != "cuda" or devices.count > 1:
        return None
    return (
        "one CUDA device runs rows of one partition only; --on cpu runs pipelines on the CPU's "
        f"{many(cores(), 'core')}, at scale small"
    )
