"""Figures: text stays text, colours are the page's, and what is drawn is what the records say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from reproduce.records.record import Record
from reproduce.report.bars import ablation_figures, memory_figures
from reproduce.report.curves import ideal, speed_up_figures
from reproduce.report.figure import VARIABLES
from reproduce.report.gantt import SCHEDULES, costs, schedule_figures
from reproduce.report.subjects import Subject, find_subjects
from torchgpipe.plan.replay import replay


def subjects(records: list[Record]) -> dict[str, Subject]:
    return {subject.name: subject for subject in find_subjects(records)}


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter() if element.tag == "text"
    ]


def label(svg: str) -> str:
    return ElementTree.fromstring(svg).attrib["aria-label"]


@pytest.fixture(scope="module")
def figures(everything: list[Record]) -> list[str]:
    made = [svg for svg, _ in schedule_figures()]
    for subject in find_subjects(everything):
        for maker in (speed_up_figures, memory_figures, ablation_figures):
            made.extend(svg for svg, _ in maker(subject))
    return made


@pytest.mark.slow
def test_figures_fit_a_page(figures: list[str]) -> None:
    assert len(figures) > 15
    for svg in figures:
        root = ElementTree.fromstring(svg)
        assert root.attrib["width"] == "360", "a phone's width"
        assert texts(svg), "text is text"
        colors = set(re.findall(r"#[0-9a-f]{6}", svg))
        assert not colors, f"colours that do not follow the page: {colors}"
        used = set(re.findall(r"var\((--[sd]\d|--text|--faint|--back|--font)\)", svg))
        assert used and used <= {*VARIABLES.values(), "--font"}
        assert "DejaVu" not in svg and "<metadata" not in svg and "http" not in svg


def test_ids_are_unique_in_the_page(figures: list[str]) -> None:
    ids = [name for svg in figures for name in re.findall(r' id="([^"]+)"', svg)]
    assert len(ids) == len(set(ids))
    for svg in figures:
        own = set(re.findall(r' id="([^"]+)"', svg))
        assert set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg)) <= own


@pytest.mark.parametrize(
    ("n", "m", "speed_up"), [(1, 1, 1), (8, 1, 1), (2, 1, 1), (2, 4, 1.6), (4, 4, 16 / 7), (8, 32, 256 / 39)]
)
def test_ideal(n: int, m: int, speed_up: float) -> None:
    assert ideal(n, m) == pytest.approx(speed_up)


def test_a_curve_for_each_m(everything: list[Record]) -> None:
    found = speed_up_figures(subjects(everything)["amoebanet-speed"])
    assert [caption for _, caption in found] == [f"Speed-up over the table's first row, m = {m}." for m in (1, 4, 32)]
    svg = found[2][0]
    assert "published n=2 1.77, n=4 2.71, n=8 4.95" in label(svg)
    assert "ideal n·m/(n+m-1)" in texts(svg) and "measured (small, CUDA)" in texts(svg)


def test_one_curve_where_m_goes_along_with_n(everything: list[Record]) -> None:
    ((svg, _),) = speed_up_figures(subjects(everything)["unet-speed"])
    assert "published n=1 1.00, n=1 0.86, n=2 1.25, n=4 2.35, n=8 3.11" in label(svg)
    assert {"plain", "n=8"} <= set(texts(svg))


def test_memory_is_stacked_by_device(everything: list[Record]) -> None:
    found = {caption: svg for svg, caption in memory_figures(subjects(everything)["amoebanet-memory"])}
    reserved = next(svg for caption, svg in found.items() if caption.startswith("Peak of reserved"))
    assert "our pipeline-2 device 0 2.79 GiB, device 1 2.98 GiB" in label(reserved)
    published = next(svg for caption, svg in found.items() if caption.endswith("was not published."))
    assert "baseline model 0.91 GiB, activations unknown" in label(published) and "0.91 + ?" in texts(published)


def test_the_ablation_is_drawn_where_components_differ(everything: list[Record]) -> None:
    found = subjects(everything)
    captions = [caption for _, caption in ablation_figures(found["unet-ablation"])]
    assert [caption.split()[0] for caption in captions] == ["Throughput", "Utilization", "Reserved", "Allocated"]
    assert "dep-str-ptl 1.91" in label(ablation_figures(found["unet-ablation"])[0][0])
    assert not ablation_figures(found["unet-speed"])


def test_timelines() -> None:
    found = schedule_figures()
    assert len(found) == len(SCHEDULES)
    assert found[0][1] == "naive model parallelism, n = 4, m = 1: the devices wait 75% of the time."
    timeline = replay(costs(4, 4, "never"))
    assert timeline.bubble == pytest.approx(1 - ideal(4, 4) / 4), "as the paper has it"
    assert f"wait {timeline.bubble:.0%} of the time" in found[1][1]
