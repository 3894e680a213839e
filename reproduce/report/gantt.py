"""Draw a step's timeline as a Gantt chart, a line per device, so that the bubble is visible. Needs matplotlib."""

import io
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.report.figure import BACK, FAINT, SERIES, new_figure, styled, svg
from torchgpipe.plan.replay import Timeline
from torchgpipe.plan.report import duration
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
PAGE_COLORS = (*SERIES[:5], FAINT, BACK)  # of the kinds of task, and of the background
FILE_COLORS = ("#4c78a8", "#f2b14a", "#54a24b", "#54a24b", "#88d27a", "#7f7f7f", "white")
FILE_WIDTH, LINE, MARGIN = (
    10.0,
    0.55,
    1.75,
)  # inches: the picture's width, a line's height, height without lines
BAR, COPY_BAR = 0.8, 0.14  # heights of a task and of a copy, as shares of a line
DIGIT = 0.11  # width of a digit in inches

# name, m, checkpoint mode
SCHEDULES = (
    ("naive model parallelism", 1, "never"),
    ("GPipe, checkpoint=never", 4, "never"),
    ("GPipe, checkpoint=except_last", 4, "except_last"),
    ("GPipe, checkpoint=except_last", 8, "except_last"),
)
PARTITIONS = 4


def gantt(timeline: Timeline, title: str, kind: str) -> bytes:
    """Return the picture of a timeline as a file; `kind` is `svg` or `png`."""
    figure = Figure(figsize=(FILE_WIDTH, MARGIN + LINE * timeline.partitions), layout="constrained")
    axes = figure.add_subplot()
    start, end = timeline.window
    bubble = f"bubble {timeline.bubble:.0%} of {timeline.partitions} x {duration(end - start)}"
    _draw(
        figure,
        axes,
        timeline,
        f"{title}\n{bubble}; the whole step took {duration(timeline.seconds)}",
        FILE_COLORS,
    )
    axes.set_xlabel("seconds since the first task began; white is the bubble")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    return picture.getvalue()


def trace_figures(traces: Sequence[tuple[str, Timeline]]) -> Iterator[tuple[str, str]]:
    """Yield a figure for each recorded step, with its caption. The title says whether it was emulated."""
    for i, (title, timeline) in enumerate(traces):
        start, end = timeline.window
        caption = f"{title}; the devices wait {timeline.bubble:.0%} of {duration(end - start)}."
        yield _page_figure(f"trace-{i}", title, timeline), caption


def schedule_figures() -> Iterator[tuple[str, str]]:
    """Yield a figure for each schedule, replayed with equal tasks whose copies take no time, with its caption."""

    def replayed_with(m: int, checkpoint: str) -> Timeline:
        made = make("GPipe", PARTITIONS, m, checkpoint=checkpoint)
        return made.replay(lambda action: units(action) / m, loss=0.0)

    replayed = [replayed_with(m, checkpoint) for _, m, checkpoint in SCHEDULES]
    for i, ((name, m, _), timeline) in enumerate(zip(SCHEDULES, replayed, strict=True)):
        caption = (
            f"{name}, n = {PARTITIONS}, m = {m}: the devices wait {timeline.bubble:.0%} of the time"
        )
        caption += (
            f", and a step takes {timeline.seconds / replayed[0].seconds:.0%} of naive's."
            if i
            else "."
        )
        yield _page_figure(f"timeline-{i}", f"{name}, m = {m}", timeline), caption


@styled
def _page_figure(name: str, title: str, timeline: Timeline) -> str:
    figure, axes = new_figure(0.85 + 0.27 * timeline.partitions)
    _draw(figure, axes, timeline, title, PAGE_COLORS)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    start, end = timeline.window
    described = f"{end - start:.2f} s from the first task to the last, bubble {timeline.bubble:.0%}"
    return svg(figure, name, f"Timeline of {title}: {described}")


def _draw(
    figure: Figure, axes: Axes, timeline: Timeline, title: str, colors: Sequence[str]
) -> None:
    """Draw every task, with its micro-batch's number where there is room; a copy is a thin line below the tasks."""
    color, back = dict(zip(KINDS, colors, strict=False)), colors[-1]
    start, end = timeline.window
    length = end - start or 1.0
    for event in timeline.events:
        copy, width = event.kind == "copy", event.end - event.start
        middle = timeline.row(event) + (BAR + COPY_BAR) / 2 * copy
        edge = min(0.6, 40 * width / length)  # on narrow tasks, wide edges would look like a bubble
        axes.barh(
            middle,
            width,
            left=event.start - start,
            height=COPY_BAR if copy else BAR,
            linewidth=edge,
            color=color[event.kind],
            edgecolor=back,
        )
    digit = DIGIT * length / figure.get_size_inches()[0]  # width of a digit in seconds
    fitting = [
        task
        for task in timeline.tasks
        if task.end - task.start > digit * len(str(task.micro_batch))
    ]
    # Draw numbers only if most tasks have room for theirs.
    for task in fitting if len(fitting) > 0.8 * len(timeline.tasks) else []:
        axes.annotate(
            str(task.micro_batch),
            ((task.start + task.end) / 2 - start, timeline.row(task)),
            ha="center",
            va="center",
            color=back,
        )
    axes.set_xlim(0, length)
    axes.set_ylim(timeline.partitions - 0.5 + COPY_BAR, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(timeline.partitions), [f"device {j}" for j in range(timeline.partitions)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    kinds = [kind for kind in KINDS if any(event.kind == kind for event in timeline.events)]
    handles = [Patch(color=color[kind], label=KINDS[kind]) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, handlelength=1, frameon=False
    )
