"""Define the command `schedule`, which draws a pipeline schedule."""

from pathlib import Path

import click

from reproduce.cli.shared import COUNT, FILE, command, shown
from reproduce.error import Error


@command("schedule 1F1B -n 4 -m 8", "schedule ZBH1 --svg zbh1.svg")
@click.argument("name", metavar="NAME|FILE")
@click.option("-n", "devices", type=COUNT, help="Devices. Default: 4, or as the file has it.")
@click.option(
    "-m", "micro_batches", type=COUNT, help="Micro-batches. Default: 8, or as the file has it."
)
@click.option("-v", "stages", type=COUNT, help="Stages on each device.")
@click.option(
    "--checkpoint",
    type=click.Choice(["always", "except_last", "never"]),
    metavar="MODE",
    default="never",
    show_default=True,
    help="always, except_last or never.",
)
@click.option(
    "--svg", type=FILE, metavar="FILE", help="Write a picture, too: FILE.svg or FILE.png."
)
def schedule(  # noqa: PLR0913 - click passes each option
    name: str,
    devices: int | None,
    micro_batches: int | None,
    stages: int | None,
    checkpoint: str,
    svg: Path | None,
) -> None:
    """Draw a schedule: a row is a device, a column a unit of time.

    NAME is GPipe, 1F1B, Interleaved1F1B, ZBH1, ZBH2 or ZBVZeroBubble. FILE is a schedule that
    torch.distributed.pipelining wrote as .csv. A backward takes two units of time. Every other
    action takes one: a forward, a recomputation, or one half of a split backward.
    """
    from torchgpipe.schedules import Schedule, make

    if svg is not None and svg.suffix not in (".svg", ".png"):
        raise Error(f"--svg {svg}: the name of a picture ends in .svg or .png")
    try:
        file = Schedule.load(name) if name.endswith(".csv") else None
        n = devices or (len(file.lists) if file else 4)
        m = micro_batches or (file.micro_batches if file else 8)
        found = make(file or name, n, m, stages, checkpoint)
    except (OSError, ValueError) as error:
        raise Error(str(error)) from None
    played = found.replay()
    count = len(found.placement)
    size = f"n = {n}, m = {m}, {count} stages"
    click.echo(f"{found.name}, {size}, checkpoint={checkpoint}\n\n{found}\n")
    of_longest = f"{played.bubble_of_longest:.1%} of the longest device's span"
    of_step = f"{played.bubble:.1%} of the step"
    click.echo(f"bubble: {of_longest}, {of_step}")
    click.echo(f"the step takes {played.seconds:g} units")
    kept = ", ".join(map(str, found.in_flight))
    click.echo(f"kept at most, tasks by device: {kept}")
    if svg is None:
        return
    from reproduce.records.record import write_atomically
    from reproduce.report.gantt import gantt

    kind = svg.suffix.removeprefix(".")
    write_atomically(svg, gantt(played, found.name, kind))
    click.echo(f"written: {shown(svg)}", err=True)
