"""Define the command `run`, which runs experiments and shows their results."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import click

from reproduce.cli.job import THREADS, Job, Options, make_recorder, validate
from reproduce.cli.shared import (
    COUNT,
    FILE,
    HARDWARE,
    PATH,
    Command,
    command,
    described,
    devices,
    known,
    on,
    seed,
    shown,
    style,
)
from reproduce.error import Error, Interrupted, interruptible
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import PUBLISHED_NODE, Experiment, Scale
from reproduce.machine.devices import MOST_DEVICES
from reproduce.machine.load import Load
from reproduce.records.places import RUNS
from reproduce.records.record import OFFERED, SUCCESS, Engine, write_atomically
from reproduce.run.progress import Progress, duration
from reproduce.run.recorder import Recorder
from reproduce.tables.layout import many


class RunCommand(Command):
    """A click command whose option `--set` takes several values at once, as in `--set n=4 m=16`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        return super().parse_args(ctx, with_each_set(args))


def with_each_set(words: Sequence[str]) -> list[str]:
    """Repeat `--set` before each of its values in a command line, because click needs that.

    For example, `--set n=4 m=16` becomes `--set n=4 --set m=16`.
    """
    expanded = []
    in_settings = False
    previous = ""
    for word in words:
        is_setting = "=" in word and not word.startswith("-")
        if is_setting and in_settings:
            expanded.append("--set")
        expanded.append(word)
        follows = previous == "--set" or in_settings
        in_settings = word.startswith("--set=") or (is_setting and follows)
        previous = word
    return expanded


@command(
    "run unet-memory --scale small",
    "run unet-speed --row pipeline-2 --set n=4 m=16",
    cls=RunCommand,
)
@click.argument("experiments", nargs=-1, required=True, **known("experiment", lambda: EXPERIMENTS))
@click.option(
    "--scale",
    type=click.Choice(["paper", "small"]),
    help="Default: the largest that this machine holds; for accuracy, small without --data.",
)
@click.option(
    "--row", "rows", multiple=True, metavar="NAME", help="Run only this row; may be repeated."
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE ...",
    help="Change --row: n, m, batch_size, balance, checkpoint, or a size of the model.",
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
    default=THREADS,
    show_default=True,
    metavar="NAME",
    help="Speed: by threads, ranks (a process each) or torch (PyTorch's own); may be repeated.",
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
    help=f"Speed: emulate copies as on this hardware: {', '.join(HARDWARE)}, or a file (.json); at "
    "scale small, in proportion to the tasks. "
    "Default: the GPUs here, if they are among these; else "
    f"{PUBLISHED_NODE} for rows like the published ones.",
)
@seed
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
    help="Speed: write a timeline of each row: FILE.json for Perfetto and a picture, FILE.svg or "
    ".png.",
)
@click.option(
    "--data",
    type=PATH,
    metavar="DIR",
    help="Accuracy: the folder of ImageNet, with train/<class>/*.JPEG and val/<class>/*.JPEG.",
)
@style
@click.option("--resume", is_flag=True, help="Go on with the last run, which was interrupted.")
@click.option("--seeds", type=COUNT, metavar="K", help="Accuracy: train each row from K seeds.")
def run(**options: Any) -> None:
    """Run experiments, print their tables and keep a record. The record is a file of all results.
    EXPERIMENTS are names of experiments; the command list shows all names.
    """
    job = validate(Options(**options))
    recorder = make_recorder(job)
    progress = Progress()
    interrupted = execute(job, recorder, progress)
    recorder.close("finished" if interrupted is None else "interrupted")
    recorder.save()
    show(job, recorder, progress, interrupted)


# --- execute: run the experiments -----------------------------------------------------------------


def execute(job: Job, recorder: Recorder, progress: Progress) -> Interrupted | None:
    """Run the experiments, and show each table when it is finished.

    Return an error if a signal such as Ctrl-C ended the run, otherwise None.
    """
    from reproduce.run.experiment import plan, run_experiment
    from reproduce.tables.engines import GROUP as ENGINES

    make_session = session_maker(job, recorder, progress)
    if job.tracer is not None and not job.tracer.draw:
        progress.say(
            "--trace: no picture, only JSON, for matplotlib is not installed: "
            "'pip install matplotlib'"
        )
    place = shown(recorder.path)
    progress.say(f"scale {job.scale} on {job.devices}; what is finished is kept in\n{place}")
    try:
        with interruptible() as check:
            sessions = [make_session(experiment, at, check) for experiment, at in job.chosen]
            for session in sessions:
                session.tell_others()
                plan(session)
            recorder.save()
            progress.say(how_long(progress, sessions))
            for session in sessions:
                name = session.experiment.name
                progress.say(f"running {name}: {session.experiment.title}")
                groups = itertools.chain(run_experiment(session), [(ENGINES, True)])
                for group, done in groups:
                    progress.clear()
                    show_group(job, recorder, name, group, done=done)
        return None
    except KeyboardInterrupt as interrupt:
        return Interrupted(interrupt)
    finally:
        progress.clear()


def how_long(progress: Progress, sessions: Sequence[Any]) -> str:
    """Return a line that says how long a run will probably take, and the source of this estimate.

    The time includes building the models.
    """
    seconds = progress.seconds_left()
    if seconds is None:
        return "how long it takes is not known before its first steps"
    text = f"it takes about {duration(seconds)}"
    sources = sessions[0].times.sources  # all sessions share them
    return f"{text}, by {' and '.join(sources)}" if sources else text


def session_maker(job: Job, recorder: Recorder, progress: Progress) -> Callable[..., Any]:
    """Return a function that creates a `Session`, the object that runs one experiment.

    All sessions share the recorder (which writes the results), the balances (how layers are divided
    among partitions), the estimated times of steps, and the measurement of the machine's load.
    """
    from reproduce.run.estimate import StepTimes, earlier_runs
    from reproduce.run.session import Session
    from reproduce.run.training import Balancer

    options = job.options
    balancer = Balancer(job.devices)
    assert recorder.empty.run is not None
    earlier = earlier_runs(options.out, recorder.empty.run)
    times = StepTimes(job.devices, balancer, options.seed, earlier)
    load = Load()
    engines: list[Engine] = []
    for name, meant in OFFERED.items():
        if name in options.engines:
            engines += meant

    def make(experiment: Experiment, scale: Scale, check: Callable[[], None]) -> Session:
        return Session(
            experiment=experiment,
            scale=scale,
            devices=job.devices,
            recorder=recorder,
            progress=progress,
            balancer=balancer,
            times=times,
            seed=options.seed,
            steps=options.steps,
            emulate=job.emulate,
            hardware=options.link,
            check=check,
            engines=engines,
            trace=job.tracer,
            accuracy=job.accuracy.get(experiment.name),
            load=load,
        )

    return make


# --- show: print tables, and say what was written -------------------------------------------------


def show_group(job: Job, recorder: Recorder, experiment: str, group: str, *, done: bool) -> None:
    """Print the tables of a group: the rows (configurations) that are compared with each other.

    `done` says whether the group is finished. The tables of a finished group go to stdout if the
    output style is text. All other tables go to stderr.
    """
    from reproduce.tables.all import tables

    on_stderr = not done or job.options.style != "text"
    for table in tables(recorder.record, experiment, group):
        click.echo(f"\n{table.text()}", err=on_stderr)


def show(job: Job, recorder: Recorder, progress: Progress, interrupted: Interrupted | None) -> None:
    """Write the run's Markdown page, and print which files the run has written.

    If the output style is not text, also print the results in this style.

    Raises:
        Error: A row failed, no row has a number, or a timeline could not be written.
        click.exceptions.Exit: The run was interrupted.
    """
    from reproduce.tables.all import document, written_records

    style = job.options.style
    record = recorder.record
    if style != "text":
        click.echo(written_records([record], style), nl=False)
    page = recorder.path.with_suffix(".md")
    write_atomically(page, document(record))
    if interrupted is not None:
        finished = [result for result in record.results if result.status in SUCCESS]
        kept = f"{many(len(finished), 'finished row')} kept in {shown(recorder.path)}"
        click.echo(f"{interrupted}; {kept}; --resume goes on", err=True)
        raise click.exceptions.Exit(interrupted.exit_code)
    written = [recorder.path, page]
    if job.tracer is not None:
        written += job.tracer.written
    progress.say("\n".join(["written:", *map(shown, written)]))
    failed = [result for result in record.results if result.status == "failed"]
    if failed:
        first = f"{failed[0].row}: {failed[0].reason}"
        raise Error(f"{many(len(failed), 'row')} failed, the first being {first}")
    if not any(result.status in SUCCESS for result in record.results):
        reasons = {result.reason or result.status for result in record.results}
        raise Error(f"no row has a number: {', '.join(sorted(reasons))}")
    if job.tracer is not None and job.tracer.problems:
        raise Error(f"--trace: {job.tracer.problems[0]}")
