"""Define the command `schedule`, which draws a pipeline schedule."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reproduce.cli.shared import COUNT, FILE, command, devices_by_default, shown, style
from reproduce.error import Error

if TYPE_CHECKING:
    from reproduce.tables.output import Number
    from torchgpipe.schedules import Schedule

LARGEST_DRAWING = 1_000_000
"""The largest n * v * (n + m): about the number of forwards and waits that a drawing shows."""


@command("schedule 1F1B -n 4 -m 8", "schedule ZBH1 --out zbh1.svg")
@click.argument("name", metavar="NAME|FILE")
@devices_by_default("4, or the file's.")
@click.option(
    "-m", "--chunks", type=COUNT, metavar="M", help="Micro-batches. Default: 8, or the file's."
)
@click.option("-v", "--stages", type=COUNT, metavar="V", help="Stages on each device.")
@click.option(
    "--checkpoint",
    type=click.Choice(["always", "except_last", "never"]),
    metavar="MODE",
    default="never",
    show_default=True,
    help="always, except_last or never.",
)
@style
@click.option(
    "--out", type=FILE, metavar="FILE", help="Also write a picture: FILE.svg or FILE.png."
)
def schedule(  # noqa: PLR0913 - click passes each option
    name: str,
    devices: int | None,
    chunks: int | None,
    stages: int | None,
    checkpoint: str,
    style: str,
    out: Path | None,
) -> None:
    """Draw a pipeline schedule.

    NAME is GPipe, 1F1B, Interleaved1F1B, ZBH1, ZBH2 or ZBVZeroBubble. FILE is a schedule that
    torch.distributed.pipelining wrote as .csv. Each line of the drawing is a device. A forward of a
    stage, its recomputation, and each half of a split backward take one column. A whole backward
    takes two columns. Times are in units: one unit is the forward of one micro-batch through 1/n of
    the model, where n is the number of devices.
    """
    from reproduce.tables.layout import bullets
    from reproduce.tables.output import written
    from torchgpipe.schedules import Schedule, make

    if out is not None and out.suffix not in (".svg", ".png"):
        raise Error(f"--out {out}: the name of a picture must end in .svg or .png")
    try:
        file = Schedule.load(name) if name.endswith(".csv") else None
        n = devices or (len(file.lists) if file else 4)
        m = chunks or (file.micro_batches if file else 8)
        check_size(n, m, stages or 1)
        found = make(file or name, n, m, stages, checkpoint)
    except (OSError, ValueError) as error:
        raise Error(str(error)) from None
    size = f"n = {n}, m = {m}, {len(found.placement)} stages"
    title = f"{found.name}, {size}, checkpoint={checkpoint}"
    facts = list(_facts(found))
    text = f"{title}\n\n{found}\n\n{bullets(facts)}\n"
    markdown = f"{title}\n\n```\n{found}\n```\n\n{bullets(facts, wrap=False)}\n"
    click.echo(written(style, _numbers(found, title), text, markdown), nl=False)
    if out is None:
        return
    from reproduce.records.record import write_atomically
    from reproduce.report.gantt import gantt

    kind = out.suffix.removeprefix(".")
    write_atomically(out, gantt(found.replay(), found.name, kind))
    click.echo(f"written: {shown(out)}", err=True)


def check_size(n: int, m: int, v: int) -> None:
    """Raise `Error` if the drawing of a schedule would be too large.

    Args:
        n: The number of devices.
        m: The number of micro-batches.
        v: The number of stages on each device.
    """
    if n * v * (n + m) > LARGEST_DRAWING:
        raise Error(
            f"the drawing of n = {n} devices, m = {m} micro-batches and v = {v} stages on each "
            f"device would be too large: n * v * (n + m) may be at most {LARGEST_DRAWING:,}"
        )


def _column(schedule: "Schedule") -> Fraction:
    """Return how many units of time a column of the drawing lasts.

    A column is the forward of a micro-batch through one stage. A unit is the forward of a
    micro-batch through 1/n of the model, where n is the number of devices.
    """
    return Fraction(len(schedule.lists), len(schedule.placement))


def _units(schedule: "Schedule", seconds: float) -> float:
    """Convert seconds of a simulation to the units of time that the command `schedule` prints.

    In the simulation, each column of the drawn schedule lasts one second. A unit is the forward of
    one micro-batch through 1/n of the model, for n devices.
    """
    return seconds * float(_column(schedule))


def _facts(schedule: "Schedule") -> Iterator[str]:
    """Yield lines of text that say how large a schedule's bubble, time and memory are."""
    played = schedule.replay()
    of_longest = f"{played.bubble_of_longest:.1%} of the longest device's span"
    of_step = f"{played.bubble:.1%} of the step"
    yield f"bubble: {of_longest}, {of_step}"
    yield f"the step takes {_units(schedule, played.seconds):g} units"
    column = _column(schedule)
    share = f"1/{len(schedule.lists)} of the model"
    columns = "a column is a unit" if column == 1 else f"a column is {column} of a unit"
    yield f"a unit is the forward of one micro-batch through {share}; {columns}"
    kept = ", ".join(map(str, schedule.in_flight))
    stage = f"1/{len(schedule.placement)} of the model"
    text = f"kept at most, tasks by device: {kept}; a task is one micro-batch in {stage}"
    if any(action.kind == "recompute" for action in schedule.actions):
        text += ", and keeps only its inputs if it is recomputed later"
    yield text


def _numbers(schedule: "Schedule", title: str) -> "Iterator[Number]":
    """Yield the numbers of a schedule for CSV or JSON, each as a dictionary of fields.

    The numbers are the step's time, two measures of the bubble, and for each device, the largest
    number of tasks whose activations it keeps.
    """
    played = schedule.replay()
    about: Number = {"experiment": title, "row": schedule.name}
    unit = f"forwards of a micro-batch through 1/{len(schedule.lists)} of the model"
    yield {**about, "metric": "step", "unit": unit, "value": _units(schedule, played.seconds)}
    yield {**about, "metric": "bubble", "unit": "share of the step", "value": played.bubble}
    yield {
        **about,
        "metric": "bubble_of_longest",
        "unit": "share of the longest device's span",
        "value": played.bubble_of_longest,
    }
    unit = f"tasks of each device, each 1/{len(schedule.placement)} of the model"
    yield {**about, "metric": "kept", "unit": unit, "value": schedule.in_flight}
