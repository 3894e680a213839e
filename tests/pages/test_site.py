"""Test in a real browser that the site of `make docs` can be read on narrow and on wide screens.

The tests need the packages that `make docs` installs, and are skipped without them.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproduce.machine.description import ROOT

from .browser import WITHOUT, opened, set_screen, show

for package in ("sphinx", "furo", "myst_parser"):
    pytest.importorskip(package, reason=f"{package} is not installed: run 'make docs'")
pytestmark = [pytest.mark.slow, WITHOUT]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build the site, and return its pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "docs", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return sorted(folder.glob("*.html"))


@pytest.mark.parametrize("width", [500, 1200])
def test_no_code_is_cut(width: int, pages: list[Path], browser: Any) -> None:
    """Check that long lines of code are wrapped. Only pictures made of text may scroll sideways."""
    set_screen(browser, width)
    count = 0
    cut = []
    for page in pages:
        show(browser, page)
        blocks, wide = browser.execute_script(
            """const blocks = [...document.querySelectorAll("article .highlight pre")];
            const wide = blocks.filter(block => {
                const picture = block.closest(".highlight-text");
                const scrolls = ["auto", "scroll"].includes(getComputedStyle(block).overflowX);
                return block.scrollWidth > block.clientWidth + 1 && !(picture && scrolls);
            });
            return [blocks.length, wide.map(block => block.textContent)];"""
        )
        count += blocks
        cut += [(page.stem, text) for text in wide]
    assert count > 50
    assert cut == []


@pytest.mark.parametrize("width", [500, 1200])
def test_what_is_wider_than_the_page_scrolls(width: int, pages: list[Path], browser: Any) -> None:
    set_screen(browser, width)
    count = 0
    wide = []
    for page in pages:
        show(browser, page)
        elements, found = browser.execute_script(
            """const limit = document.documentElement.clientWidth, wide = [];
            const scrolls = each => ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
            const within = each => {
                for (let outer = each.parentElement; outer; outer = outer.parentElement)
                    if (outer.matches("article *") && scrolls(outer)) return true;
                return false;
            };
            const elements = [...document.querySelectorAll("article *:not(svg *)")];
            for (const each of elements) {
                const right = each.getBoundingClientRect().right;
                if (right > limit + 0.5 && !within(each)) wide.push(each.outerHTML.slice(0, 200));
            }
            if (document.documentElement.scrollWidth > limit) wide.push("the page");
            return [elements.length, wide];"""
        )
        count += elements
        wide += [(page.stem, text) for text in found]
    assert count > 1000
    assert wide == []
