"""Draw a step's timeline as a Gantt chart, a line per device, so that the bubble is seen. Needs matplotlib."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reproduce.run.timeline import Span, StepTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["gantt"]

COLORS = {"forward": "#4c78a8", "recompute": "#f2b14a", "backward": "#54a24b", "copy": "#7f7f7f"}
NAMES = {"forward": "forward", "recompute": "recomputation", "backward": "backward", "copy": "copy"}
WIDTH, LINE_HEIGHT, MARGIN = 10.0, 0.55, 1.75  # inches: of the picture, of a device's line, around the lines
BAR, COPY_BAR = 0.8, 0.14  # shares of a line
NUMBER_WIDTH = 0.011  # a digit's share of the picture's width


def gantt(timeline: StepTimeline, title: str, kind: str) -> bytes:
    """Return the picture of a timeline; `kind` is `svg` or `png`.

    Raises:
        ImportError: matplotlib is not installed, or broken.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start, end = timeline.window
    scale, unit = (1000.0, "ms") if end - start < 10 else (1.0, "s")
    figure = Figure(figsize=(WIDTH, MARGIN + LINE_HEIGHT * timeline.devices), layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, timeline, start, scale)
    if _readable(timeline):
        _numbers(axes, timeline, start, scale)

    axes.set_xlim(0, (end - start) * scale or 1)
    axes.set_ylim(timeline.devices - 0.5 + COPY_BAR, -0.5)
    axes.set_yticks(range(timeline.devices))
    axes.set_yticklabels(f"device {device}" for device in range(timeline.devices))
    axes.set_xlabel(f"{unit} since the first task began; white is the bubble")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontweight="bold", pad=24)
    axes.annotate(
        f"bubble {timeline.bubble:.0%} of {timeline.devices} x {(end - start) * scale:.4g} {unit}; "
        f"the whole step took {timeline.seconds * scale:.4g} {unit}",
        xy=(0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
    )  # fmt: skip
    kinds = [name for name in NAMES if any(span.task.kind == name for span in timeline.spans)]
    figure.legend(
        handles=[Patch(color=COLORS[name], label=NAMES[name]) for name in kinds],
        loc="outside lower center", ncols=len(kinds), frameon=False,
    )  # fmt: skip

    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    return picture.getvalue()


def _bars(axes: Axes, timeline: StepTimeline, start: float, scale: float) -> None:
    """Draw every task; a copy is a thin line below its device's tasks."""
    groups: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        groups.setdefault((span.task.kind, span.task.partition), []).append(span)
    for (kind, device), spans in groups.items():
        copy = kind == "copy"
        ranges = [((span.start - start) * scale, (span.end - span.start) * scale) for span in spans]
        place = (device + BAR / 2, COPY_BAR) if copy else (device - BAR / 2, BAR)
        edge = min(0.5, 50 * _share(timeline, spans))  # or white edges would look like a bubble
        axes.broken_barh(ranges, place, facecolor=COLORS[kind], edgecolor="white", linewidth=edge)


def _numbers(axes: Axes, timeline: StepTimeline, start: float, scale: float) -> None:
    """Write its micro-batch's number into each task that has room for it."""
    for span in timeline.tasks:
        number = str(span.task.micro_batch)
        if _share(timeline, [span]) > NUMBER_WIDTH * len(number):
            middle = ((span.start + span.end) / 2 - start) * scale
            color = "black" if span.task.kind == "recompute" else "white"
            axes.text(middle, span.task.partition, number, ha="center", va="center", fontsize=8, color=color)


def _readable(timeline: StepTimeline) -> bool:
    """Tell whether nearly every task has room for its number: a few numbers here and there would only confuse."""
    widths = [(_share(timeline, [span]), NUMBER_WIDTH * len(str(span.task.micro_batch))) for span in timeline.tasks]
    return sum(share > needed for share, needed in widths) > 0.8 * len(widths)


def _share(timeline: StepTimeline, spans: Sequence[Span]) -> float:
    """Return the spans' median length, as a share of the picture's width."""
    start, end = timeline.window
    return statistics.median(span.end - span.start for span in spans) / (end - start or 1)
