"""Check the options of `python -m reproduce run`, and begin the run's record (file of results)."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.changes import change_rows
from reproduce.experiments.choose import choose_rows, choose_scale
from reproduce.experiments.recipe import AccuracyScale
from reproduce.experiments.row import Experiment, Scale
from reproduce.machine.allocator import freed_memory_is_kept
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import Json
from reproduce.records.published import published
from reproduce.records.record import FREED_MEMORY, Record
from reproduce.run.recorder import Recorder, new_recorder, new_run, prepare_folder, resumed

TIMED = ("speed", "ablation")  # experiments that measure one of these time their steps
Chosen = list[tuple[Experiment, Scale]]
THREADS = ("threads",)  # the default of the option --engine


@dataclass(frozen=True)
class Options:
    """The values of the command's parameters."""

    experiments: list[str]
    scale: str | None
    rows: tuple[str, ...]
    changes: tuple[str, ...]
    extra: bool
    on: str | None
    devices: int | None
    steps: int | None
    engines: tuple[str, ...]
    emulate: int
    no_emulate: bool
    link: Any
    seed: int
    out: Path
    trace: Path | None
    data: Path | None
    resume: bool
    style: str
    seeds: int | None


@dataclass(frozen=True)
class Job:
    """The experiments to run, with options that have been checked.

    Attributes:
        options: The options of the command `run`.
        chosen: The experiments, each with the scale (the set of sizes) at which it runs.
        scale: The name of this scale.
        devices: The devices to use.
        emulate: The largest number of devices to emulate, or 0 to emulate none.
        tracer: The object that writes timelines, or None without the option --trace.
        accuracy: Maps the name of each accuracy experiment to its data and seeds.
    """

    options: Options
    chosen: Chosen
    scale: str
    devices: Devices
    emulate: int
    tracer: Any
    accuracy: dict[str, Any]


def validate(options: Options) -> Job:
    """Check that the options fit each other and this machine, and return the job to run."""
    from reproduce.experiments.datasets import prepare

    if options.changes and not options.rows:
        raise click.UsageError(
            f"--set {' '.join(options.changes)}: also name the row to change by --row, such as "
            "--row n2m4"
        )
    named = [EXPERIMENTS[name] for name in options.experiments]
    asked = choose_rows(named, options.rows, extra=options.extra)
    measured: set[str] = set()
    for experiment in asked:
        measured.add(experiment.measures)
        if experiment.table is not None:
            # Report a missing or broken file before the run starts.
            published(experiment.table)
    found = find_devices(options.on, options.devices)
    check_measures(options, found, measured)
    scale = options.scale
    if scale is None and "accuracy" in measured:
        scale = "small" if options.data is None else "paper"
    scale = choose_scale(asked, found, scale)
    chosen = []
    for experiment in asked:
        at = experiment.scale(scale)
        if options.changes:
            at = change_rows(at, options.changes)
        chosen.append((experiment, at))
    prepare_folder(options.out)
    emulate = 0 if options.no_emulate else options.emulate
    tracer = None
    if options.trace is not None:
        several = emulate > 0 or len(options.engines) > 1
        tracer = make_tracer(options.trace, chosen, several=several)
    accuracy = {}
    for experiment, at in chosen:
        if isinstance(at, AccuracyScale):
            name = experiment.name
            accuracy[name] = prepare(name, at, options.data, options.seed, options.seeds)
    return Job(options, chosen, scale, found, emulate, tracer, accuracy)


def check_measures(options: Options, found: Devices, measured: set[str]) -> None:
    """Raise an error if an option does not apply to what the experiments measure.

    For example, --seeds applies only to experiments that measure accuracy.
    """
    if options.engines != THREADS and measured.isdisjoint(TIMED):
        raise click.UsageError(
            "--engine is for experiments that time steps: speed experiments and unet-ablation; "
            "leave --engine out for other experiments"
        )
    if found.kind == "meta" and measured != {"memory"}:
        on_memory = [each.name for each in EXPERIMENTS.values() if each.measures == "memory"]
        raise click.UsageError(f"--on meta is for experiments on memory: {', '.join(on_memory)}")
    for_accuracy = options.data is not None or options.seeds is not None
    if for_accuracy and "accuracy" not in measured:
        raise click.UsageError(
            "--data and --seeds are for experiments on accuracy, such as resnet101-accuracy; "
            "leave them out for other experiments"
        )


def make_tracer(trace: Path, chosen: Chosen, *, several: bool) -> Any:
    """Return the object that writes the timeline of each row (configuration) to a trace file.

    Raise an error if no experiment times steps, or if the folder of `trace` is not writable.

    Args:
        trace: The path of the file. If there are several files, their names begin with its name.
        chosen: The experiments to run, and their rows.
        several: Whether a row can have several timelines, for example one for each engine.
    """
    from reproduce.report.trace import Tracer

    # Count the experiments that time steps, and the rows of these experiments.
    timed = rows = 0
    for experiment, scale in chosen:
        if experiment.measures in TIMED:
            timed += 1
            rows += len(scale.rows)
    if not timed:
        first, _ = chosen[0]
        raise click.UsageError(
            f"--trace: {first.measures} experiments time no step; name a speed experiment"
        )
    prepare_folder(trace.absolute().parent, "--trace")
    can_draw = find_spec("matplotlib") is not None
    return Tracer(trace, several=several or rows > 1, experiments=timed > 1, draw=can_draw)


def make_recorder(job: Job) -> Recorder:
    """Return the object that writes the run's record, the file of its results.

    With the option --resume, the record is that of the last run. Otherwise, the record is new.
    """
    from reproduce.run.session import UNITS

    options = job.options
    command = ["python", "-m", "reproduce", *sys.argv[1:]]
    started = new_run(job.devices, options.seed, command, settings_of(job))
    if options.resume:
        return resumed(options.out, started)
    title = "; ".join(experiment.title for experiment, _ in job.chosen)
    empty = Record("", title, "measured", UNITS, [], scale=job.scale, run=started)
    return new_recorder(options.out, options.experiments, empty)


def settings_of(job: Job) -> dict[str, Json]:
    """Return the settings that are stored in the run's record (its file of results).

    They are the options of the command line, and the settings of each experiment.
    """
    options = job.options
    settings: dict[str, Json] = {
        "steps": options.steps,
        "seeds": options.seeds,
        "emulate": job.emulate,
        FREED_MEMORY: "kept" if freed_memory_is_kept() else "as the C library does",
    }
    if options.rows:
        settings["rows"] = list(options.rows)
    if options.changes:
        settings["set"] = list(options.changes)
    if options.extra:
        settings["all"] = True
    if options.engines != THREADS:
        settings["engines"] = list(options.engines)
    for experiment, at in job.chosen:
        settings[experiment.name] = at.settings()
    return settings
