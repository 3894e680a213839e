"""Figures: text stays text, colours are the page's, and what is drawn is what the records say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from reproduce.records.record import Record
from reproduce.report.figure import VARIABLES
from reproduce.report.figures import ablation_figures, ideal, memory_figures, speed_up_figures
from reproduce.report.gantt import costs, schedule_figures
from torchgpipe.plan.replay import replay

from .conftest import subject


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()).strip() for each in ElementTree.fromstring(svg).iter() if each.tag == "text"]


def label(svg: str) -> str:
    return ElementTree.fromstring(svg).attrib["aria-label"]


def test_figures_fit_a_page(text: str) -> None:
    figures = re.findall("<svg .*?</svg>", text, re.DOTALL)
    assert len(figures) > 15
    for svg in figures:
        assert ElementTree.fromstring(svg).attrib["width"] == "360", "a phone's width"
        assert texts(svg), "text is text"
        colors = set(re.findall(r"#[0-9a-f]{6}", svg))
        assert not colors, f"colours that do not follow the page: {colors}"
        used = set(re.findall(r"var\((--[a-z]+\d?)\)", svg))
        assert used and used <= {*VARIABLES.values(), "--font"}
        assert "DejaVu" not in svg and "<metadata" not in svg and "http" not in svg
        ids = set(re.findall(r' id="([^"]+)"', svg))
        assert set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids


def test_a_curve_for_each_m(everything: list[Record]) -> None:
    found = list(speed_up_figures(subject(everything, "amoebanet-speed")))
    assert [caption for _, caption in found] == [f"Speed-up over the table's first row, m = {m}." for m in (1, 4, 32)]
    svg = found[2][0]
    assert "published n=2 1.77, n=4 2.71, n=8 4.95" in label(svg)
    assert "ideal n·m/(n+m-1)" in texts(svg) and "measured (small, CUDA)" in texts(svg)


def test_one_curve_where_m_goes_along_with_n(everything: list[Record]) -> None:
    ((svg, _),) = speed_up_figures(subject(everything, "unet-speed"))
    assert "published n=1 1.00, n=1 0.86, n=2 1.25, n=4 2.35, n=8 3.11" in label(svg)
    assert {"plain", "n=8"} <= set(texts(svg))


def test_memory_is_stacked_by_device(everything: list[Record]) -> None:
    figures = {caption: svg for svg, caption in memory_figures(subject(everything, "amoebanet-memory"))}
    reserved = next(svg for caption, svg in figures.items() if caption.startswith("Peak of reserved"))
    assert "our pipeline-2 device 0 2.79 GiB, device 1 2.98 GiB" in label(reserved) and "5.77" in texts(reserved)
    published = next(svg for caption, svg in figures.items() if caption.endswith("was not published."))
    assert "baseline model 0.91 GiB, activations unknown" in label(published) and "0.91 + ?" in texts(published)


def test_the_ablation_is_drawn_where_components_differ(everything: list[Record]) -> None:
    figures = list(ablation_figures(subject(everything, "unet-ablation")))
    assert [caption.split()[0] for _, caption in figures] == ["Throughput", "Utilization", "Reserved", "Allocated"]
    assert "published baseline 1.00, dep-x-x 0.37" in label(figures[2][0])
    assert "dep-str-ptl 1.91" in label(figures[0][0]) and "1.91" in texts(figures[0][0])
    assert not list(ablation_figures(subject(everything, "unet-speed")))


def test_timelines() -> None:
    captions = [caption for _, caption in schedule_figures()]
    assert captions[0] == "naive model parallelism, n = 4, m = 1: the devices wait 75% of the time."
    assert (ideal(1, 1), ideal(8, 1), ideal(8, 32)) == (1, 1, 256 / 39)
    timeline = replay(costs(4, 4, "never"))
    assert timeline.bubble == pytest.approx(1 - ideal(4, 4) / 4), "as the paper has it"
    assert f"wait {timeline.bubble:.0%} of the time" in captions[1]
    assert captions[3].endswith("a step takes 42% of naive's."), "5 seconds, not 12"
