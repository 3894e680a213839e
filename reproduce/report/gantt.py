"""Draw the timeline of a training step as a Gantt chart, with a line for each device.

The gaps in the chart are the bubble: the time in which devices wait. This module needs matplotlib.
"""

import io
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.report.figure import (
    BACK,
    FAINT,
    SERIES,
    WIDTH,
    Legend,
    new_figure,
    set_title,
    styled,
    svg,
)
from torchgpipe.plan.predict.replay import Timeline
from torchgpipe.plan.tables import duration
from torchgpipe.schedules import make
from torchgpipe.schedules.replay import units

KINDS = {
    "forward": "forward",
    "recompute": "recomputation",
    "backward": "backward",
    "backward_inputs": "backward of inputs",
    "backward_weights": "backward of weights",
    "copy": "copy",
}
HATCHES = {  # so that kinds of task differ in more than their colours
    "recompute": "////",
    "backward": "\\\\",
    "backward_inputs": "\\\\",
    "backward_weights": "....",
}
PAGE_COLORS = (*SERIES[:5], FAINT, BACK)  # of the kinds of task, and of the background
FILE_COLORS = ("#4c78a8", "#f2b14a", "#54a24b", "#54a24b", "#88d27a", "#7f7f7f", "white")
FILE_WIDTH = 10.0
"""The width of a picture file in inches."""
LINE = 0.55
"""The height of a device's line in a picture file, in inches."""
MARGIN = 1.75
"""The height of what is above and below the devices' lines in a picture file, in inches."""
BAR = 0.8
"""The height of the bar of a task, as a fraction of the height of a device's line."""
COPY_BAR = 0.14
"""The height of the bar of a copy, as a fraction of the height of a device's line."""
DIGIT = 0.11
"""The width of a digit in inches."""

# Each line: the name, m and the checkpoint mode of a schedule.
SCHEDULES = (
    ("naive model parallelism", 1, "never"),
    ("GPipe, checkpoint=never", 4, "never"),
    ("GPipe, checkpoint=except_last", 4, "except_last"),
    ("GPipe, checkpoint=except_last", 8, "except_last"),
)
PARTITIONS = 4


def gantt(timeline: Timeline, title: str, kind: str) -> bytes:
    """Draw the timeline of a training step, and return the content of a picture file.

    Args:
        timeline: The tasks of the step, with their times.
        title: The title of the picture.
        kind: The format of the picture: `svg` or `png`.
    """
    size = (FILE_WIDTH, MARGIN + LINE * timeline.partitions)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    window = duration(_length(timeline))
    bubble = f"bubble {timeline.bubble:.0%} of {timeline.partitions} x {window}"
    whole = f"the whole step took {duration(timeline.seconds)}"
    _draw(axes, timeline, FILE_COLORS, FILE_WIDTH)
    axes.set_title(f"{title}\n{bubble}; {whole}", loc="left", fontweight="bold")
    keys = _keys(timeline, FILE_COLORS)
    figure.legend(
        handles=keys, loc="outside lower center", ncols=len(KINDS), handlelength=1, frameon=False
    )
    axes.set_xlabel("seconds since the first task began; white is the bubble")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    return picture.getvalue()


def trace_figures(traces: Sequence[tuple[str, Timeline]]) -> Iterator[tuple[str, str]]:
    """Yield a figure with a caption for each recorded training step.

    Args:
        traces: The title and the timeline of each step.
    """
    for i, (title, timeline) in enumerate(traces):
        window = duration(_length(timeline))
        caption = f"{title}; the devices wait {timeline.bubble:.0%} of {window}."
        yield _page_figure(f"trace-{i}", title, timeline), caption


def schedule_figures() -> Iterator[tuple[str, str]]:
    """Yield a figure with a caption for each schedule in `SCHEDULES`.

    The timelines are computed, not measured: a backward takes twice as long as a forward, and
    copies take no time.
    """
    naive = 0.0  # seconds of the first schedule, which is naive model parallelism
    for i, (name, m, checkpoint) in enumerate(SCHEDULES):
        timeline = _replayed(m, checkpoint)
        waits = f"the devices wait {timeline.bubble:.0%} of the time"
        caption = f"{name}, n = {PARTITIONS}, m = {m}: {waits}"
        if i == 0:
            naive = timeline.seconds
        else:
            caption += f", and a step takes {timeline.seconds / naive:.0%} of naive's"
        yield _page_figure(f"timeline-{i}", f"{name}, m = {m}", timeline), caption + "."


def _replayed(m: int, checkpoint: str) -> Timeline:
    """Return the computed timeline of GPipe's schedule with m micro-batches.

    A forward or a recomputation of a micro-batch takes 1/m seconds, and a backward takes 2/m
    seconds. So all forwards of a mini-batch on one device take 1 second, whatever m is.
    """
    schedule = make("GPipe", PARTITIONS, m, checkpoint=checkpoint)
    return schedule.replay(lambda action: units(action) / m, loss=0.0)


def _length(timeline: Timeline) -> float:
    """Return how many seconds pass from the start of the first task to the end of the last task."""
    start, end = timeline.window
    return end - start


@styled
def _page_figure(name: str, title: str, timeline: Timeline) -> str:
    keys = _keys(timeline, PAGE_COLORS)
    legend = Legend([str(key.get_label()) for key in keys], most=4)
    figure, axes = new_figure(0.65 + 0.27 * timeline.partitions + legend.height)
    _draw(axes, timeline, PAGE_COLORS, WIDTH)
    set_title(axes, title)
    legend.add(figure, keys)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    window = f"{_length(timeline):.2f} s from the first task to the last"
    described = f"{window}, bubble {timeline.bubble:.0%}"
    return svg(figure, name, f"Timeline of {title}: {described}")


def _keys(timeline: Timeline, colors: Sequence[str]) -> list[Patch]:
    """Return the entries of the legend for a timeline: one for each kind of task that it has."""
    back = colors[-1]
    drawn = {event.kind for event in timeline.events}
    keys = []
    for (kind, label), color in zip(KINDS.items(), colors, strict=False):
        if kind in drawn:
            hatch = HATCHES.get(kind)
            keys.append(Patch(facecolor=color, edgecolor=back, hatch=hatch, label=label))
    return keys


def _draw(axes: Axes, timeline: Timeline, colors: Sequence[str], inches: float) -> None:
    """Draw every task of a timeline, and the names of the devices.

    A copy is drawn as a thin line below the tasks. If most tasks are wide enough, each wide task
    shows the number of its micro-batch.

    Args:
        axes: Where to draw.
        timeline: The timeline of a training step.
        colors: The colour of each kind of task, and the background colour.
        inches: The width of the picture in inches.
    """
    color = dict(zip(KINDS, colors, strict=False))
    back = colors[-1]
    length = _length(timeline) or 1.0
    _draw_bars(axes, timeline, length, color, back)
    digit = DIGIT * length / inches  # width of a digit in seconds
    _draw_numbers(axes, timeline, digit, color, back)
    devices = range(timeline.partitions)
    axes.set_xlim(0, length)
    axes.set_ylim(timeline.partitions - 0.5 + COPY_BAR, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(devices, [f"device {j}" for j in devices])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(
    axes: Axes, timeline: Timeline, length: float, color: Mapping[str, str], back: str
) -> None:
    """Draw a bar for every task and every copy of a timeline.

    Args:
        axes: Where to draw.
        timeline: The timeline of a training step.
        length: The length of the timeline in seconds.
        color: The colour of each kind of task.
        back: The background colour.
    """
    start, _ = timeline.window
    for event in timeline.events:
        middle = float(timeline.row(event))
        height = BAR
        if event.kind == "copy":
            middle += (BAR + COPY_BAR) / 2
            height = COPY_BAR
        width = event.end - event.start
        edge = min(0.6, 40 * width / length)  # on narrow tasks, wide edges would look like a bubble
        axes.barh(
            middle,
            width,
            left=event.start - start,
            height=height,
            linewidth=edge,
            color=color[event.kind],
            edgecolor=back,
            hatch=HATCHES.get(event.kind),
        )


def _draw_numbers(
    axes: Axes, timeline: Timeline, digit: float, color: Mapping[str, str], back: str
) -> None:
    """Draw, on each task that is wide enough, the number of the task's micro-batch.

    If 20 % of the tasks or more are too narrow, draw no numbers at all.

    Args:
        axes: Where to draw.
        timeline: The timeline of a training step.
        digit: The width of a digit, in seconds of the time axis.
        color: The colour of each kind of task.
        back: The background colour, in which the numbers are drawn.
    """
    start, _ = timeline.window
    fitting = []
    for task in timeline.tasks:
        needed = digit * len(str(task.micro_batch))
        if task.end - task.start > needed:
            fitting.append(task)
    if len(fitting) <= 0.8 * len(timeline.tasks):
        return
    for task in fitting:
        middle = (task.start + task.end) / 2 - start
        place = (middle, timeline.row(task))
        ground = {"facecolor": color[task.kind], "edgecolor": "none", "pad": 2}  # no hatch
        axes.annotate(
            str(task.micro_batch), place, ha="center", va="center", color=back, bbox=ground
        )
