"""Tests of the report in a real browser.

The tests use the screen sizes of phones and desktops, printed pages, and light and dark colours.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reproduce.machine.git import Git
from reproduce.records.record import Record
from reproduce.report.page import page
from reproduce.tables.history import Line
from reproduce.tables.output import Number

from ...library.timeline.test_record import STEP
from ...pages.browser import WITHOUT, opened, set_screen, show

pytestmark = [pytest.mark.slow, WITHOUT]
WIDTHS = {"phone": 360, "500": 500, "1200": 1200, "1600": 1600, "print": 1077}
"""The width of the page in CSS pixels. That of `print` is A4 paper, landscape, without margins."""
SCHEMES = {"phone": "dark", "500": "light", "1200": "dark", "1600": "light", "print": "light"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as found:
        yield found


def number(value: float) -> Number:
    """Make a number of a history."""
    return {
        "experiment": "unet-speed",
        "row": "baseline",
        "kind": "measured",
        "metric": "time",
        "unit": "s",
        "value": value,
    }


@pytest.fixture(scope="module")
def whole(records: list[Record], own: list[Record]) -> str:
    """Return the HTML of a report with everything that a report can have.

    For example, it has traces, a history, and a list of files that could not be read.
    """
    title = "amoebanet-speed: a name of a row that does not fit into one line of a title"
    lines = []
    for i in range(8):
        git = Git(f"{i}123456789", dirty=False)
        lines.append(Line(git, f"202{i}", "a machine", [number(1.0 + i % 3)]))
    return page(records, [(title, STEP)], lines, own, ["runs/broken.json: not JSON"])


@pytest.fixture(scope="module", params=WIDTHS)
def run(
    request: pytest.FixtureRequest,
    browser: Any,
    whole: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """Open the report in a browser, and return a function that runs JavaScript on the page."""
    screen = request.param
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(whole, encoding="utf-8")
    media = "print" if screen == "print" else "screen"
    set_screen(
        browser, WIDTHS[screen], scheme=SCHEMES[screen], media=media, mobile=screen == "phone"
    )
    show(browser, file)
    browser.execute_script(
        "for (const each of document.querySelectorAll('details')) each.open = true"
    )
    return browser.execute_script


def test_no_number_and_no_word_of_a_head_is_broken(run: Callable[..., Any]) -> None:
    """Check that no word in a table is broken over two lines.

    Outside of tables, only words with digits are checked.
    """
    count, broken = run(
        """const broken = [];
        let count = 0;
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let node = walker.nextNode(); node; node = walker.nextNode()) {
            const inside = node.parentElement;
            if (inside.closest("svg, h3, footer") || !inside.offsetParent) continue;
            const cell = inside.closest("th, td, caption");
            for (const found of node.data.matchAll(/\\S+/g)) {
                const word = found[0];
                if (!cell && (!/[0-9]/.test(word) || word.length > 24)) continue;
                const range = document.createRange();
                range.setStart(node, found.index);
                range.setEnd(node, found.index + word.length);
                const boxes = [...range.getClientRects()].filter(box => box.width > 0);
                count += 1;
                if (new Set(boxes.map(box => Math.round(box.top))).size > 1) broken.push(word);
            }
        }
        return [count, broken];"""
    )
    assert count > 500
    assert broken == []


def test_tables_scroll_and_the_page_does_not(run: Callable[..., Any]) -> None:
    """Check that nothing is wider than the page, except for tables on screens, which can scroll.

    On wide screens, the figures must use most of the page's width.
    """
    width, paper, wide, figures = run(
        """const limit = document.documentElement.clientWidth, wide = [];
        const paper = matchMedia("print").matches;
        for (const each of document.querySelectorAll("body *:not(svg *)")) {
            if (!paper && each.closest(".wide") && !each.matches(".wide")) continue;
            const right = each.getBoundingClientRect().right;
            if (right > limit + 0.5) wide.push(each.outerHTML.slice(0, 200));
        }
        if (document.documentElement.scrollWidth > limit) wide.push("the page");
        const rights = [...document.querySelectorAll("figure")].map(
            each => each.getBoundingClientRect().right
        );
        return [limit, paper, wide, Math.max(...rights)];"""
    )
    assert wide == []
    if width > 1000 and not paper:
        assert figures > 0.9 * width


def test_figures_are_whole(run: Callable[..., Any]) -> None:
    """Check that texts are large enough and within their figure, and that no marker is cut off."""
    outside, cut, markers, smallest = run(
        """const outside = [], cut = [], sizes = [];
        let markers = 0;
        for (const svg of document.querySelectorAll("figure svg")) {
            const frame = svg.getBoundingClientRect();
            if (!frame.width) continue;
            const scale = frame.width / svg.viewBox.baseVal.width;
            sizes.push(scale * 8);
            for (const text of svg.querySelectorAll("text")) {
                const box = text.getBoundingClientRect();
                const inside = box.left >= frame.left - 2 && box.right <= frame.right + 2
                    && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2;
                if (!inside) outside.push(text.textContent);
            }
            for (const group of svg.querySelectorAll("[clip-path]")) {
                const name = group.getAttribute("clip-path").slice(5, -1);
                const rect = svg.querySelector("#" + CSS.escape(name) + " rect");
                const top = frame.top + scale * rect.y.baseVal.value;
                const left = frame.left + scale * rect.x.baseVal.value;
                const bottom = top + scale * rect.height.baseVal.value;
                const right = left + scale * rect.width.baseVal.value;
                for (const each of group.querySelectorAll("use")) {
                    markers += 1;
                    const box = each.getBoundingClientRect();
                    const inside = box.left >= left - 1 && box.right <= right + 1
                        && box.top >= top - 1 && box.bottom <= bottom + 1;
                    if (!inside) cut.push(svg.getAttribute("aria-label"));
                }
            }
        }
        return [outside, cut, markers, Math.min(...sizes)];"""
    )
    assert outside == []
    assert markers > 20
    assert cut == []
    assert smallest > 9, "CSS pixels of the small print"


def test_two_series_of_a_figure_differ_in_dash_and_marker(run: Callable[..., Any]) -> None:
    """Check that two curves of the same colour in a figure have different dashes and markers."""
    several, alike = run(
        """const alike = [];
        let several = 0;
        for (const svg of document.querySelectorAll("figure svg")) {
            const of = {};
            for (const line of svg.querySelectorAll("[id*=legend_] [id*=line2d]")) {
                const marker = line.querySelector("use");
                if (!marker) continue;
                const style = getComputedStyle(line.querySelector("path:not(defs path)"));
                const drawn = svg.querySelector(marker.getAttribute("href")).getAttribute("d");
                (of[style.stroke] ||= []).push([style.strokeDasharray, drawn]);
            }
            for (const series of Object.values(of)) {
                if (series.length > 1) several += 1;
                for (const k of [0, 1]) {
                    const looks = new Set(series.map(each => each[k]));
                    if (looks.size < series.length) alike.push(svg.getAttribute("aria-label"));
                }
            }
        }
        return [several, alike];"""
    )
    assert several > 0
    assert alike == []


def contrast(one: str, other: str) -> float:
    """Return the contrast of two CSS colours, as the accessibility guidelines WCAG define it."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """Return the relative luminance of a CSS colour such as `rgb(255, 0, 0)`."""
    parts = color[color.index("(") + 1 : -1].split(",")
    total = 0.0
    for part, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=False):
        value = int(part) / 255
        dark, light = value / 12.92, ((value + 0.055) / 1.055) ** 2.4
        linear = dark if value <= 0.04045 else light
        total += weight * linear
    return total


def test_the_scheme_is_followed_and_text_stands_out_from_its_ground(
    run: Callable[..., Any],
) -> None:
    """Check that the page follows the colour scheme of the browser, light or dark.

    The contrast of text must be at least 4.5 to 1, as the accessibility guidelines WCAG demand.
    """
    dark, ground, colors = run(
        """const texts = ["p.lead", "td", "h2", "a", "figure text", "dd", "figcaption"];
        const colors = texts.map(what => {
            const style = getComputedStyle(document.querySelector(what));
            return what === "figure text" ? style.fill : style.color;
        });
        const dark = matchMedia("(prefers-color-scheme: dark)").matches;
        return [dark, getComputedStyle(document.body).backgroundColor, colors];"""
    )
    white = "rgb(255, 255, 255)"
    if dark:
        assert contrast(ground, white) > 10
    else:
        assert ground == white
    for color in colors:
        assert contrast(color, ground) >= 4.5
