"""Draw figures with matplotlib as SVG that lives in a page: its text is text, its colours are the page's.

Matplotlib does not support CSS. So figures are drawn in placeholder colours, which are then replaced by CSS variables;
the page sets these for light and dark mode. A figure is as wide as a phone's screen, so there its text is as large as
the page's. A wider screen shows several figures in a row.
"""

import html
import io
import re
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 3.75  # inches (96 CSS pixels each): a small phone's screen without margins
POINTS, PIXELS = 72, 96  # per inch

TEXT, FAINT, BACK = "#fd0000", "#fd0001", "#fd0002"
SERIES = [f"#fe000{i}" for i in range(8)]  # of sources and of kinds of task
DEVICES = [f"#fe001{i}" for i in range(8)]  # of the devices, one after another
VARIABLES = {TEXT: "--text", FAINT: "--faint", BACK: "--back"} | {
    color: f"--{name}{i}"
    for name, colors in (("s", SERIES), ("d", DEVICES))
    for i, color in enumerate(colors)
}

styled = matplotlib.rc_context(fname=Path(__file__).parent / "figure.mplstyle")
"""A decorator for functions that draw figures of the page: it sets the style."""


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the page's width and a height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an SVG element. `name` is a prefix that makes its ids unique in the page."""
    name = re.sub("[^A-Za-z0-9]", "-", name)
    text = io.StringIO()
    figure.savefig(
        text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    content = text.getvalue()
    content = content[content.index("<svg") :]
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    content = re.sub(r"<!--.*?-->", "", content, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        content = content.replace(color, f"var({variable})")
    content = re.sub(r"(font: (?:\w+ )*?[\d.]+px|font-family:) [^;\"]*", r"\1 var(--font)", content)
    content = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", content)
    width, height = (round(inches * PIXELS) for inches in figure.get_size_inches())
    opening = (
        f'<svg role="img" aria-label="{html.escape(description)}" '
        f'viewBox="0 0 {width * POINTS / PIXELS:g} {height * POINTS / PIXELS:g}" width="{width}" height="{height}">'
    )
    content = re.sub(r"<svg[^>]*>", opening, content, count=1)
    return re.sub(r"\s*\n\s*", "\n", content).replace("xlink:href", "href")
