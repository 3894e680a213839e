"""Draw figures with matplotlib, as SVG elements of an HTML page.

- A figure has the colours of the page, even in dark mode. Matplotlib cannot write CSS variables. So
  a figure is drawn in placeholder colours, which `svg` replaces by CSS variables of the page.
- A figure has the font of the page. Its text is written as text, and not as vector paths.
- A figure is as wide as a phone's screen, so a phone does not shrink its text. A wider screen shows
  several figures side by side.
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 3.75
"""The width of a figure in inches: that of a phone's screen without margins, 360 CSS pixels."""
TITLE = 38
"""The number of characters that fit in a line of a figure's title."""
LEGEND = 46
"""The number of characters that fit in a line of a figure's legend."""
POINTS, PIXELS = 72, 96
"""The number of points in an inch, and the number of CSS pixels in an inch."""

TEXT, FAINT, BACK = "#fd0000", "#fd0001", "#fd0002"
SERIES = [f"#fe000{i}" for i in range(8)]
"""Colours for the sources of numbers in a figure, and for the kinds of task in a timeline."""
DEVICES = [f"#fe001{i}" for i in range(8)]
"""Colours for the first device, the second device and so on."""
VARIABLES = {TEXT: "--text", FAINT: "--faint", BACK: "--back"}
"""The name of the CSS variable for which each placeholder colour stands."""
for _i, _color in enumerate(SERIES):
    VARIABLES[_color] = f"--s{_i}"
for _i, _color in enumerate(DEVICES):
    VARIABLES[_color] = f"--d{_i}"
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

styled = matplotlib.rc_context(fname=Path(__file__).parent / "figure.mplstyle")
"""A decorator for functions that draw figures of the page: it sets the style."""


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, `height` inches high and as wide as all figures of the page."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def set_title(axes: Axes, title: str) -> None:
    """Give a figure a title, and break the title into as many lines as it needs."""
    axes.set_title(textwrap.fill(title, TITLE))


class Legend:
    """A legend below a figure.

    Args:
        labels: The texts of the legend.
        most: The largest number of columns. The legend has fewer columns if its texts are long.

    Attributes:
        height: The height of the legend in inches.
    """

    def __init__(self, labels: Sequence[str], most: int) -> None:
        longest = max(map(len, labels))
        fitting = max(1, LEGEND // longest)
        self.columns = min(most, fitting, len(labels))
        self.height = 0.19 * math.ceil(len(labels) / self.columns)

    def add(self, figure: Figure, handles: Sequence[Artist] | None = None) -> None:
        """Draw the legend below the figure.

        Args:
            figure: The figure.
            handles: The entries of the legend. By default, these are all curves that have a label.
        """
        if handles is None:
            figure.legend(loc="outside lower center", ncols=self.columns)
        else:
            figure.legend(
                handles=handles, loc="outside lower center", ncols=self.columns, handlelength=1
            )


def svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an SVG element of the HTML page.

    Args:
        figure: The figure, in placeholder colours that are replaced by CSS variables.
        name: A prefix for the ids in the element, which makes them unique in the page.
        description: What the figure shows, for screen readers.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    start = text.index("<svg")
    text = text[start:]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"(font: (?:\w+ )*?[\d.]+px|font-family:) [^;\"]*", r"\1 var(--font)", text)
    prefix = re.sub("[^A-Za-z0-9]", "-", name)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"<svg[^>]*>", _opening(figure, description), text, count=1)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.replace("xlink:href", "href")


def _opening(figure: Figure, description: str) -> str:
    """Return the opening tag, `<svg ...>`, of a figure's SVG element."""
    inches_wide, inches_high = figure.get_size_inches()
    width = round(inches_wide * PIXELS)
    height = round(inches_high * PIXELS)
    label = html.escape(description)
    box = f"0 0 {width * POINTS / PIXELS:g} {height * POINTS / PIXELS:g}"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="{box}" width="{width}" height="{height}">'
    )
