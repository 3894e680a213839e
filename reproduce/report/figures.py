"""Draw curves for the report page.

Some figures show speed-ups, with a curve for each source of numbers: published, predicted, measured
or emulated. Other figures show how a number changed from one git revision to the next.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes

from reproduce.numbers.metrics import MARK, Reading
from reproduce.report.figure import FAINT, Legend, new_figure, set_title, styled, svg
from reproduce.report.looks import Look, look, looks
from reproduce.report.subjects import RUN, Source, Subject
from reproduce.tables.history import Line, name_of
from reproduce.tables.output import Number
from torchgpipe.plan.tables import figure as figure_text

IDEAL = "if only the bubble cost time"
ABOUT_IDEAL = (
    "The dotted line is n·m/(n+m-1), the speed-up over one device if only the bubble cost time, "
    "divided by this number for the first row. Rows also differ in recomputation and in the size "
    "of micro-batches, so points can lie above the line."
)
ROOM = 1.1
"""The height of a chart divided by that of its highest point, so that its marker is not cut."""
Captioned = tuple[str, str]
"""A figure (SVG), and its caption."""
Place = tuple[int, int]
"""The number of partitions (n), and the number of micro-batches (m)."""
Point = tuple[str, Number]
"""The name of a git revision, and a number that was measured at this revision."""
Curves = dict[Source, dict[Place, Reading]]


def ideal(n: int, m: int) -> float:
    """Return the speed-up over one device that a pipeline would have if only its bubble cost time.

    The pipeline has n partitions that take equal time, and m micro-batches. Section 2.3 of the
    GPipe paper gives the size of the bubble of its schedule. Recomputation is not included.
    """
    return n * m / (n + m - 1)


def _places(subject: Subject) -> dict[str, Place]:
    """Return the place of each row in the figures; leave out rows of other groups than the first.

    Rows of another group have other batch sizes, or repeat rows of the first group. Published rows
    have no groups.
    """
    first = next(iter(subject.rows.values())).get("group")
    places = {}
    for row, config in subject.rows.items():
        if config.get("group") == first:
            places[row] = (config.get("partitions") or 1, config.get("chunks") or 1)
    return places


def speed_up_figures(subject: Subject) -> Iterator[Captioned]:
    """Yield figures with captions that show how speed-ups depend on n, the number of partitions.

    There is a figure for each number of micro-batches, m. But if one of these figures would have
    only one row (configuration), there is a single figure for all rows. Its x-axis has the pairs of
    n and m.
    """
    places = _places(subject)
    curves: Curves = {}
    for source in subject.sources:
        points = {}
        for row, reading in subject.readings(source, "speedup").items():
            if row in places:
                points[places[row]] = reading
        if len(points) > 1:
            curves[source] = points
    along = list(dict.fromkeys(places.values()))
    if not curves or len(along) == 1 or subject.several_models:
        return
    base = ideal(*along[0])
    rows_of: Counter[int] = Counter()  # how many rows have each m
    ns = set()
    for n, m in places.values():
        rows_of[m] += 1
        ns.add(n)
    if 1 in rows_of.values():  # m changes along with n
        yield _speed_ups(subject, curves, along, base)
        return
    for m in sorted(rows_of):
        of_m = [(n, m) for n in sorted(ns)]
        yield _speed_ups(subject, curves, of_m, base)


@styled
def _speed_ups(subject: Subject, curves: Curves, places: list[Place], base: float) -> Captioned:
    """Draw a figure of speed-ups: a curve for each source of numbers, and the curve of `ideal`.

    A source is, for example, a measured run. In each pair (n, m), n is the number of partitions and
    m is the number of micro-batches.

    Args:
        subject: The experiment or published table.
        curves: The speed-ups of each source, by the pair (n, m).
        places: The pairs (n, m) to draw. If all of them have the same m, the x-axis shows n.
            Otherwise, the x-axis lists the pairs.
        base: What `ideal` returns for the first row. The curve of `ideal` is divided by it, because
            the first row is the baseline of all speed-ups in the figure.
    """
    ns, ms = zip(*places, strict=True)
    m = ms[0]
    if len(set(ms)) == 1:
        title = f"{m} micro-batch{'es' if m > 1 else ''}"
        heading = f"speed-up with {title}"
        under = f", {title}"
        label = "partitions (n)"
        at = dict(zip(places, ns, strict=True))
        ticks = list(map(str, ns))
        fine = {(n, m): n for n in range(1, ns[-1] + 1)}
    else:
        title = f"n and m as published, {subject.name}"
        heading = "speed-up"
        under = ""
        label = "partitions (n) and micro-batches (m)"
        at = dict(zip(places, range(len(places)), strict=True))
        ticks = [_tick(n, m) for n, m in places]
        fine = at
    ideals = [ideal(n, m) / base for n, m in fine]
    drawn = {}
    for source, points in curves.items():
        here = {place: points[place] for place in places if place in points}
        if here:
            drawn[source] = here
    legend = Legend([IDEAL, *(source.label for source in drawn)], most=2)
    figure, axes = new_figure(2.0 + legend.height)
    axes.grid(axis="y")
    axes.plot(list(fine.values()), ideals, ":", color=FAINT, label=IDEAL)
    look_of = looks(subject.sources)
    described = []
    caption = f"Speed-up over the table's first row{under}. {ABOUT_IDEAL}"
    for source, readings in drawn.items():
        across = [at[place] for place in readings]
        _draw_curve(axes, across, list(readings.values()), look_of[source], source.label)
        values = []
        for (n, _), reading in readings.items():
            values.append(f"n={n} {reading.middle:.2f}{reading.mark}")
        described.append(f"{source.label} {', '.join(values)}")
    axes.set_xticks(list(at.values()), ticks)
    axes.set_xlabel(label)
    axes.set_ylim(0, ROOM * _highest(ideals, drawn.values()))
    set_title(axes, heading)
    legend.add(figure)
    text = "; ".join(described)
    if MARK in text:
        caption += f" {MARK}: disturbed."
    picture = svg(figure, f"{subject.name}-speed-up-{title}", f"Speed-up over n, {title}: {text}")
    return picture, caption


def _draw_curve(
    axes: Axes, across: Sequence[float], readings: Sequence[Reading], look: Look, label: str
) -> None:
    """Draw the curve of one source of numbers, such as a measured run.

    A mark beside a point says that other programs disturbed the measurement.

    Args:
        axes: Where to draw.
        across: The horizontal position of each point.
        readings: The value of each point.
        look: The dashes, the markers and the colour of the curve.
        label: The name of the source in the legend.
    """
    up = [reading.middle for reading in readings]
    axes.plot(across, up, linestyle=look.dash, marker=look.marker, color=look.color, label=label)
    for x, reading in zip(across, readings, strict=True):
        point = (x, reading.middle)
        axes.annotate(reading.mark, point, (4, 0), textcoords="offset points")


def _highest(ideals: Iterable[float], curves: Iterable[dict[Place, Reading]]) -> float:
    """Return the largest speed-up in a chart, including the dotted curve."""
    found = list(ideals)
    for readings in curves:
        found += [reading.middle for reading in readings.values()]
    return max(found)


def _tick(n: int, m: int) -> str:
    if n == 1 and m == 1:
        return "plain\n"
    return f"n={n}\nm={m}"


def history_figures(lines: Sequence[Line]) -> list[Captioned]:
    """Return figures with captions that show how numbers changed over git revisions.

    There is a figure for each measured or emulated number on each machine. A number that is the
    same in all revisions has no figure.

    Args:
        lines: The lines of a history file. Each has the numbers of one revision on one machine.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for line in sorted(lines, key=lambda line: line.date):
        for number in line.numbers:
            if number["kind"] in RUN:
                points = found.setdefault((name_of(number), line.machine), [])
                points.append((line.git.name(7), number))
    drawn = []
    for (name, machine), points in found.items():
        values = {number["value"] for _, number in points}
        if len(values) > 1:
            drawn.append(_history(name, machine, points))
    return drawn


@styled
def _history(name: str, machine: str, points: Sequence[Point]) -> Captioned:
    """Draw how one number changed over git revisions, and its quartiles if they are known.

    Args:
        name: What the number is, such as the throughput of a row.
        machine: The machine on which the number was measured.
        points: The git revisions, each with the value of the number at this revision.
    """
    values = []
    low: list[Any] = []
    high: list[Any] = []
    revisions = []
    said = []
    for revision, number in points:
        value = number["value"]
        values.append(value)
        low.append(number.get("lower", value))
        high.append(number.get("upper", value))
        revisions.append(revision)
        said.append(f"{revision} {figure_text(value, 3)}")
    count = len(points)
    step = count // 6 + 1  # so that the revisions' names have room
    first = points[0][1]
    kind = first["kind"]
    figure, axes = new_figure(1.5)
    axes.grid(axis="y")
    axes.vlines(range(count), low, high, color=FAINT, linewidth=4)
    drawn = look(kind)
    axes.plot(values, linestyle=drawn.dash, marker=drawn.marker, color=drawn.color)
    axes.margins(y=0.15)
    axes.set_xticks(range(0, count, step), revisions[::step])
    axes.set_ylabel(first["unit"])
    picture = svg(figure, f"history-{name}-{machine}", f"{name}: {', '.join(said)}")
    return picture, f"{name}; on {machine}."
