"""Choose the colours, dashes, markers and hatches with which figures draw the sources of numbers.

A source of numbers is, for example, a measured run. The kind of a source (published, predicted,
measured or emulated) determines its colour. Readers need not rely on colour: the lines of two
sources of the same kind have different dashes and markers, and the bars of any two sources in a
chart have different hatches.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reproduce.report.figure import SERIES
from reproduce.report.subjects import Kind, Source

COLORS: dict[Kind, str] = {
    "published": SERIES[0],
    "predicted": SERIES[1],
    "measured": SERIES[2],
    "emulated": SERIES[3],
}
Dash = str | tuple[float, tuple[float, ...]]
"""The dashes of a line: a value of matplotlib's argument `linestyle`."""
# `DASHES` and `MARKERS` have a sequence for each kind of source of numbers. Its first entry is for
# the first source of this kind in a figure, its second entry is for the second, and so on.
DASHES: dict[Kind, list[Dash]] = {
    "published": ["-"],
    "predicted": ["--", (0, (9, 2)), (0, (5, 1, 2, 1)), (0, (2, 1))],
    "measured": ["-", (0, (7, 1)), (0, (3, 1)), (0, (7, 1, 3, 1))],
    "emulated": ["-.", (0, (4, 1, 1, 1, 1, 1)), (0, (3, 2)), (0, (10, 2, 2, 2))],
}
MARKERS: dict[Kind, str] = {
    "published": "o",
    "predicted": "sPH",
    "measured": "DXp8d",
    "emulated": "^v<>h",
}
HATCHES = (None, "///", "...", "xxx", "\\\\\\", "+++", "|||")  # of bars, source by source


@dataclass(frozen=True)
class Look:
    """The colour, dashes and markers of a line that shows one source of numbers, such as a run."""

    color: str
    dash: Dash
    marker: str


def looks(sources: Sequence[Source]) -> dict[Source, Look]:
    """Choose a colour, dashes and markers for each source of numbers in a figure.

    A source is, for example, one measured run, or the published table. It is drawn as a line.
    """
    seen: Counter[Kind] = Counter()
    found = {}
    for source in sources:
        found[source] = look(source.kind, seen[source.kind])
        seen[source.kind] += 1
    return found


def look(kind: Kind, place: int = 0) -> Look:
    """Choose how to draw the line of a source of numbers, such as one measured run.

    Args:
        kind: The kind of the source, such as "measured".
        place: The index of the source among the sources of the same kind.
    """
    dashes = DASHES[kind]
    markers = MARKERS[kind]
    return Look(COLORS[kind], dashes[place % len(dashes)], markers[place % len(markers)])
