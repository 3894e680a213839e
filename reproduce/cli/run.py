"""Offer `python -m reproduce run`."""

import itertools
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import click

from reproduce.cli.shared import (
    COUNT,
    FILE,
    HARDWARE,
    PATH,
    command,
    described,
    devices,
    known,
    on,
    shown,
    style,
)
from reproduce.error import INTERRUPTED, Error, interruptible
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_rows, choose_scale
from reproduce.experiments.recipe import AccuracyScale
from reproduce.experiments.row import PUBLISHED_NODE, Experiment, Scale
from reproduce.machine.allocator import freed_memory_is_kept
from reproduce.machine.devices import MOST_DEVICES, find_devices
from reproduce.machine.load import Load
from reproduce.records.places import RUNS
from reproduce.records.published import published
from reproduce.records.record import FREED_MEMORY, OFFERED, SUCCESS, write_atomically
from reproduce.run.progress import Progress
from reproduce.run.recorder import new_recorder, new_run, prepare_folder, resumed
from reproduce.tables.layout import many


@command("run unet-memory --scale small", "run unet-speed --row baseline --row pipeline-2")
@click.argument("experiments", nargs=-1, required=True, **known("experiment", lambda: EXPERIMENTS))
@click.option(
    "--scale",
    type=click.Choice(["paper", "small"]),
    help="Default: the largest that this machine holds.",
)
@click.option(
    "--row", "rows", multiple=True, metavar="NAME", help="Run only this row; may be repeated."
)
@click.option("--all", "extra", is_flag=True, help="Speed: run the rows .../mb and .../pb, too.")
@on
@devices
@click.option(
    "--steps",
    type=COUNT,
    metavar="K",
    help="Timed steps of each row. Default: the scale's, within its time limit.",
)
@click.option(
    "--engine",
    "engines",
    type=click.Choice(list(OFFERED)),
    multiple=True,
    default=("threads",),
    show_default=True,
    metavar="NAME",
    help="Speed: run partitions by threads, ranks (a process each), or "
    "torch (PyTorch's own schedules); may be repeated.",
)
@click.option(
    "--emulate",
    type=COUNT,
    default=MOST_DEVICES,
    show_default=True,
    metavar="N",
    help="Speed: emulate rows of up to N devices on one.",
)
@click.option("--no-emulate", is_flag=True, help="Speed: run only rows that there are devices for.")
@click.option(
    "--link",
    metavar="NAME|FILE",
    callback=described,
    help="Speed: emulate copies as on this "
    f"hardware: {', '.join(HARDWARE)}, or a file (.json). Default: the GPUs here, if they are among "
    f"these; else {PUBLISHED_NODE} for rows like the published ones.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of parameters, data, order.",
)
@click.option(
    "--out",
    type=PATH,
    default=RUNS,
    metavar="DIR",
    help="Where record and tables go. Default: runs.",
)
@click.option(
    "--trace",
    type=FILE,
    metavar="FILE",
    help="Speed: write a timeline of each row: "
    "FILE.json for Perfetto and a picture, FILE.svg or .png.",
)
@click.option(
    "--data",
    type=PATH,
    metavar="DIR",
    help="Accuracy: the folder of ImageNet, with train/<class>/*.JPEG and val/<class>/*.JPEG.",
)
@style
@click.option("--resume", is_flag=True, help="Go on with the last run, which was broken off.")
@click.option("--seeds", type=COUNT, metavar="K", help="Accuracy: train each row from K seeds.")
def run(
    experiments: list[str],
    scale: str | None,
    rows: tuple[str, ...],
    extra: bool,
    on: str | None,
    devices: int | None,
    steps: int | None,
    engines: tuple[str, ...],
    emulate: int,
    no_emulate: bool,
    link: Any,
    seed: int,
    out: Path,
    trace: Path | None,
    data: Path | None,
    resume: bool,
    style: str,
    seeds: int | None,
) -> None:
    """Run experiments, print their tables and keep a record. The command list shows the EXPERIMENTS."""
    from reproduce.run.accuracy.datasets import prepare
    from reproduce.run.experiment import plan, run_experiment
    from reproduce.run.session import UNITS, Session
    from reproduce.run.training import Balancer
    from reproduce.tables.all import document, tables, written_records
    from reproduce.tables.engines import GROUP as ENGINES

    asked = choose_rows([EXPERIMENTS[name] for name in experiments], rows, extra=extra)
    for experiment in asked:
        if experiment.table is not None:
            published(
                experiment.table
            )  # a missing or broken file is reported before the run, not after it
    found = find_devices(on, devices)
    measured = {experiment.measures for experiment in asked}
    if engines != ("threads",) and not measured & {"speed", "ablation"}:
        raise click.UsageError(
            "--engine is for experiments that time steps: the speed ones, and unet-ablation"
        )
    if found.kind == "meta" and measured != {"memory"}:
        on_memory = [each.name for each in EXPERIMENTS.values() if each.measures == "memory"]
        raise click.UsageError(f"--on meta is for experiments on memory: {', '.join(on_memory)}")
    if "accuracy" in measured:
        scale = scale or ("small" if data is None else "paper")
    elif data is not None or seeds is not None:
        raise click.UsageError(
            "--data and --seeds are for experiments on accuracy: run resnet101-accuracy"
        )
    scale = choose_scale(asked, found, scale)
    chosen = [(experiment, experiment.scale(scale)) for experiment in asked]
    prepare_folder(out)
    emulate = 0 if no_emulate else emulate
    tracer = (
        None
        if trace is None
        else make_tracer(trace, chosen, several=emulate > 0 or len(engines) > 1)
    )
    accuracy = {
        x.name: prepare(x.name, at, data, seed, seeds)
        for x, at in chosen
        if isinstance(at, AccuracyScale)
    }

    settings = {
        "steps": steps,
        "seeds": seeds,
        "emulate": emulate,
        FREED_MEMORY: "kept" if freed_memory_is_kept() else "as the C library does",
        **({"rows": list(rows)} if rows else {}),
        **({"all": True} if extra else {}),
        **({"engines": list(engines)} if engines != ("threads",) else {}),
        **{experiment.name: at.settings() for experiment, at in chosen},
    }
    title = "; ".join(experiment.title for experiment in asked)
    started = new_run(found, seed, ["python", "-m", "reproduce", *sys.argv[1:]], settings)
    recorder = (
        resumed(out, started)
        if resume
        else new_recorder(out, experiments, title, scale, UNITS, started)
    )
    progress, balancer, load = Progress(), Balancer(found), Load()
    if tracer and not tracer.draw:
        progress.say(
            "--trace: no picture, only JSON, for matplotlib is not installed: 'pip install matplotlib'"
        )
    progress.say(f"scale {scale} on {found}; what is finished is kept in\n{shown(recorder.path)}")
    state: Literal["finished", "interrupted"] = "interrupted"
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
                    emulate=emulate,
                    hardware=link,
                    check=check,
                    engines=[
                        engine for name in OFFERED if name in engines for engine in OFFERED[name]
                    ],
                    trace=tracer,
                    accuracy=accuracy.get(experiment.name),
                    load=load,
                )
                for experiment, at in chosen
            ]
            for session in sessions:
                session.tell_others()
                plan(session)
            recorder.save()
            for session in sessions:
                progress.say(f"running {session.experiment.name}: {session.experiment.title}")
                for group, done in itertools.chain(run_experiment(session), [(ENGINES, True)]):
                    progress.clear()
                    for table in tables(recorder.record, session.experiment.name, group):
                        click.echo(f"\n{table.text()}", err=not done or style != "text")
        state = "finished"
    except KeyboardInterrupt:
        pass
    finally:
        progress.clear()

    recorder.close(state)
    recorder.save()
    if style != "text":
        click.echo(written_records([recorder.record], style), nl=False)
    page = recorder.path.with_suffix(".md")
    write_atomically(page, document(recorder.record))
    results = recorder.record.results
    if state == "interrupted":
        kept = many(sum(result.status in SUCCESS for result in results), "finished row")
        again = "" if resume else "; --resume goes on"
        click.echo(f"interrupted; {kept} kept in {shown(recorder.path)}{again}", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    written = [recorder.path, page, *(tracer.written if tracer else [])]
    progress.say("\n".join(["written:", *map(shown, written)]))
    failed = [f"{result.row}: {result.reason}" for result in results if result.status == "failed"]
    if failed:
        raise Error(f"{many(len(failed), 'row')} failed, the first being {failed[0]}")
    if tracer is not None and tracer.problems:
        raise Error(f"--trace: {tracer.problems[0]}")


def make_tracer(trace: Path, chosen: Sequence[tuple[Experiment, Scale]], *, several: bool) -> Any:
    """Return the writer of timelines, or raise now if it could not write. `several`: rows have several timelines."""
    from reproduce.report.trace import Tracer

    timed = [at for experiment, at in chosen if experiment.measures in ("speed", "ablation")]
    if not timed:
        measures = chosen[0][0].measures
        raise click.UsageError(
            f"--trace: {measures} experiments time no step; name a speed experiment"
        )
    prepare_folder(trace.absolute().parent, "--trace")
    several = several or sum(len(at.rows) for at in timed) > 1
    return Tracer(
        trace, several=several, experiments=len(timed) > 1, draw=find_spec("matplotlib") is not None
    )
