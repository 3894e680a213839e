"""The report can be read in a real browser, on desktop and phone screens, in light and dark mode.

The tests need Chromium and its driver: `apt-get install chromium chromium-driver`. Without both,
the tests are skipped.
"""

import shutil
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install selenium"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WITHOUT = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no chromium and chromedriver to open the report in: "
    "apt-get install chromium chromium-driver",
)
pytestmark = [pytest.mark.slow, WITHOUT]
ATTEMPTS = 3  # on a busy machine, the driver can stop waiting before the browser starts
SCREENS = {"desktop": (1280, 900), "phone": (360, 740)}
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in OPTIONS:
        options.add_argument(option)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            driver = webdriver.Chrome(options=options, service=Service(DRIVER))
            break
        except WebDriverException:
            if attempt == ATTEMPTS:
                raise
    yield driver
    driver.quit()


@pytest.fixture(
    scope="module",
    params=list(product(SCREENS, ("light", "dark"))),
    ids="-".join,
)
def run(
    request: pytest.FixtureRequest,
    browser: Any,
    text: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """Open the report in a browser, and return a function that runs JavaScript on the page.

    The parameter of the fixture is the screen and the colour scheme.
    """
    screen, scheme = request.param
    page = tmp_path_factory.mktemp("report") / "report.html"
    page.write_text(text, encoding="utf-8")
    width, height = SCREENS[screen]
    metrics = {
        "width": width,
        "height": height,
        "deviceScaleFactor": 1,
        "mobile": screen == "phone",
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    browser.execute_script(
        "for (const each of document.querySelectorAll('details')) each.open = true"
    )
    return browser.execute_script


def test_nothing_scrolls_sideways_and_text_of_figures_is_readable(run: Callable[..., Any]) -> None:
    wide, outside, smallest = run(
        """const limit = document.documentElement.clientWidth, wide = [], outside = [], sizes = [];
        for (const each of document.querySelectorAll("body *:not(svg *)")) {
            const right = each.getBoundingClientRect().right;
            const fits = right <= limit + 0.5 && each.scrollWidth <= each.clientWidth + 1;
            const head = each.closest("thead");
            const hidden = head && getComputedStyle(head).position === "absolute";
            const inline = getComputedStyle(each).display === "inline";
            if (!fits && !hidden && !inline) wide.push(each.outerHTML.slice(0, 200));
        }
        for (const svg of document.querySelectorAll("figure svg")) {
            const frame = svg.getBoundingClientRect();
            for (const text of svg.querySelectorAll("text")) {
                const box = text.getBoundingClientRect();
                const inside = box.left >= frame.left - 2 && box.right <= frame.right + 2;
                if (!inside) outside.push(text.textContent);
            }
            sizes.push(frame.width / svg.viewBox.baseVal.width * 8);
        }
        if (document.documentElement.scrollWidth > limit) wide.push("the page");
        return [wide, outside, Math.min(...sizes)];"""
    )
    assert wide == []
    assert outside == []
    assert smallest > 9, "CSS pixels of the small print"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two CSS colours, which the guidelines WCAG define."""
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
    """The page follows the colour scheme, and text has the contrast of the WCAG: 4.5 to 1."""
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
