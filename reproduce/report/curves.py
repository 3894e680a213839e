"""Draw speed-up over n, for each m, of every source, with the ideal n·m / (n + m - 1) of equal partitions."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from reproduce.report.figure import FAINT, SERIES, new_figure, styled, svg
from reproduce.report.subjects import Source, Subject

COLORS = {"published": SERIES[0], "predicted": SERIES[1], "measured": SERIES[2]}
LOOKS = {"published": ("-", "o"), "predicted": ("--", "s"), "measured": ("-", "D")}
Place = tuple[int, int]  # n, m


def ideal(n: int, m: int) -> float:
    """Return the speed-up of n equal partitions and m micro-batches over one device (GPipe paper, section 2.3)."""
    return n * m / (n + m - 1)


def speed_up_figures(subject: Subject) -> list[tuple[str, str]]:
    """Return figures with their captions: one for each m that several n share, or else one along the table's rows."""
    places = {row: _place(config) for row, config in subject.rows.items()}
    curves = [(source, points) for source in subject.sources if len(points := _points(subject, source, places)) > 1]
    if not curves or len(set(places.values())) == 1:
        return []
    ns = sorted({n for n, _ in places.values()})
    base = ideal(*next(iter(places.values())))
    ms = sorted({m for _, m in places.values()})
    shared = [m for m in ms if sum(place[1] == m for place in places.values()) > 1]
    if len(shared) < len(ms):  # m changes along with n
        along = list(dict.fromkeys(places.values()))
        return [_figure(subject, curves, along, base, f"n and m as published, {subject.name}")]
    return [_figure(subject, curves, [(n, m) for n in ns], base, f"m = {m}") for m in shared]


def _figure(
    subject: Subject, curves: list[tuple[Source, dict[Place, float]]], places: list[Place], base: float, title: str
) -> tuple[str, str]:
    fixed = len({m for _, m in places}) == 1
    at = {place: float(place[0]) if fixed else float(i) for i, place in enumerate(places)}
    figure = new_figure(2.6)
    with styled():
        axes = figure.add_subplot()
        axes.grid(axis="y")
        fine = [(n, places[0][1]) for n in range(1, places[-1][0] + 1)] if fixed else places
        axes.plot([place[0] if fixed else at[place] for place in fine], [ideal(*place) / base for place in fine],
                  ":", color=FAINT, label="ideal n·m/(n+m-1)")  # fmt: skip
        for source, points in curves:
            _draw(axes, source, {at[place]: points[place] for place in places if place in points})
        axes.set_xticks(list(at.values()), [_tick(*place, fixed) for place in places])
        axes.set_xlabel("n, partitions" if fixed else "")
        axes.set_title(f"{title if fixed else 'speed-up'}", loc="left", fontweight="bold")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=2)
    described = f"Speed-up over n for {title}: " + "; ".join(
        f"{source.label} " + ", ".join(f"n={n} {points[n, m]:.2f}" for n, m in places if (n, m) in points)
        for source, points in curves
    )
    name = f"{subject.name}-speed-up-{title}".replace(" ", "").replace("=", "").replace(",", "")
    caption = f"Speed-up over the table's first row, {title}." if fixed else "Speed-up over the table's first row."
    return svg(figure, name, described), caption


def _draw(axes: Axes, source: Source, points: Mapping[float, float]) -> None:
    line, marker = LOOKS[source.kind]
    axes.plot(list(points), list(points.values()), line, marker=marker, markersize=4.5, color=COLORS[source.kind],
              label=source.label)  # fmt: skip


def _tick(n: int, m: int, fixed: bool) -> str:
    if fixed:
        return str(n)
    return "plain" if n == m == 1 else f"n={n}\nm={m}"


def _points(subject: Subject, source: Source, places: Mapping[str, Place]) -> dict[Place, float]:
    first = next(iter(places))
    found = {row: source.read(row, first, subject.table, "speedup") for row in places}
    return {places[row]: reading.middle for row, reading in found.items() if reading is not None}


def _place(config: Mapping[str, object]) -> Place:
    n, m = config.get("partitions"), config.get("chunks")
    return (n if isinstance(n, int) else 1), (m if isinstance(m, int) else 1)
