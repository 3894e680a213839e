"""Draw timelines: how the schedule fills the devices' time, replayed with equal tasks.

Backward takes twice as long as forward, recomputation as long as forward, copies nothing: what is left of waiting is
the schedule's own, the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from reproduce.report.figure import BACK, SERIES, new_figure, styled, svg
from torchgpipe.plan.replay import Costs, Timeline, replay

__all__ = ["SCHEDULES", "costs", "timeline_figures", "trace_figures"]

COLORS = {"forward": SERIES[0], "recompute": SERIES[1], "backward": SERIES[2]}
NAMES = {"forward": "forward", "recompute": "recomputation", "backward": "backward"}
# what it is called, m, which micro-batches are recomputed
SCHEDULES = (
    ("naive model parallelism", 1, "never"),
    ("GPipe, checkpoint=never", 4, "never"),
    ("GPipe, checkpoint=except_last", 4, "except_last"),
    ("GPipe, checkpoint=except_last", 8, "except_last"),
)
PARTITIONS = 4


def costs(n: int, m: int, checkpoint: str) -> Costs:
    """Return equal costs, of which a mini-batch's forward takes one second on each partition."""
    forward = 1 / m
    recomputed = {"never": 0, "except_last": m - 1, "always": m}[checkpoint]
    return Costs(
        forward=[[forward] * n] * m,
        backward=[[2 * forward] * n] * m,
        recompute=[[forward if i < recomputed else 0.0] * n for i in range(m)],
    )


def trace_figures(traces: Sequence[tuple[str, Timeline]]) -> list[tuple[str, str]]:
    """Return a figure for each step that was measured, with its caption."""
    return [
        (
            _figure(f"trace-{i}", title, timeline),
            f"Measured: {title}; the devices wait {timeline.bubble:.0%} of {_duration(timeline.seconds)}.",
        )
        for i, (title, timeline) in enumerate(traces)
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def timeline_figures() -> list[tuple[str, str]]:
    """Return a figure for each schedule, with its caption."""
    replayed = [(*schedule, replay(costs(PARTITIONS, schedule[1], schedule[2]))) for schedule in SCHEDULES]
    naive = replayed[0][-1].seconds
    return [
        (
            _figure(f"timeline-{i}", f"{name}, m={m}", timeline),
            f"{name}, n = {PARTITIONS}, m = {m}: the devices wait {timeline.bubble:.0%} of the time"
            + (f", and a step takes {timeline.seconds / naive:.0%} of naive's." if i else "."),
        )
        for i, (name, m, _, timeline) in enumerate(replayed)
    ]


def _figure(name: str, title: str, timeline: Timeline) -> str:
    figure = new_figure(0.85 + 0.27 * timeline.partitions)
    with styled():
        axes = figure.add_subplot()
        for event in timeline.events:
            width = event.end - event.start
            edge = min(0.7, 30 * width / timeline.seconds)  # of narrow tasks, wide edges would look like a bubble
            axes.barh(event.partition, width, left=event.start, color=COLORS[event.kind], edgecolor=BACK, height=0.84,
                      linewidth=edge)  # fmt: skip
            if width / timeline.seconds > 0.018:
                axes.annotate(str(event.micro_batch), (event.start + width / 2, event.partition), ha="center",
                              va="center", fontsize=7, color=BACK)  # fmt: skip
        axes.set_yticks(range(timeline.partitions), [f"j={j}" for j in range(timeline.partitions)])
        axes.invert_yaxis()
        axes.set_xlim(0, timeline.seconds)
        axes.set_xticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(title, loc="left", fontweight="bold")
        kinds = [kind for kind in NAMES if any(event.kind == kind for event in timeline.events)]
        handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=1)
    described = f"Timeline of {title}: a step takes {timeline.seconds:.2f}, bubble {timeline.bubble:.0%}"
    return svg(figure, name, described)
