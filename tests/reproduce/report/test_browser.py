"""Browser: the page can be read in a real browser, on desktop and phone screens, in light and dark mode.

Skipped if there is no Chromium with its driver: `apt-get install chromium chromium-driver`.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install selenium"
)
BROWSER, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
WITHOUT = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no chromium and chromedriver to open the report in: apt-get install chromium chromium-driver",
)
pytestmark = [pytest.mark.slow, WITHOUT]
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
    for left in (
        2,
        1,
        0,
    ):  # retries: on a busy machine a browser may start later than its driver waits
        try:
            driver = webdriver.Chrome(options=options, service=Service(DRIVER))
            break
        except WebDriverException:
            if not left:
                raise
    yield driver
    driver.quit()


@pytest.fixture(
    scope="module",
    params=[(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")],
    ids="-".join,
)
def run(
    request: pytest.FixtureRequest,
    browser: Any,
    text: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """Open the page on a screen, in a colour scheme; return a function that runs JavaScript in it."""
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
        """const limit = document.documentElement.clientWidth, outside = [], sizes = [];
        const wide = [...document.querySelectorAll("body *:not(svg *)")]
            .filter(each => each.getBoundingClientRect().right > limit + 0.5 || each.scrollWidth > each.clientWidth + 1)
            .filter(each => !(each.closest("thead") && getComputedStyle(each.closest("thead")).position === "absolute"))
            .filter(each => getComputedStyle(each).display !== "inline")
            .map(each => each.outerHTML.slice(0, 200));
        for (const svg of document.querySelectorAll("figure svg")) {
            const frame = svg.getBoundingClientRect();
            for (const text of svg.querySelectorAll("text")) {
                const box = text.getBoundingClientRect();
                if (box.left < frame.left - 2 || box.right > frame.right + 2) outside.push(text.textContent);
            }
            sizes.push(frame.width / svg.viewBox.baseVal.width * 8);
        }
        if (document.documentElement.scrollWidth > limit) wide.push("the page");
        return [wide, outside, Math.min(...sizes)];"""
    )
    assert (wide, outside) == ([], [])
    assert smallest > 9, "CSS pixels of the small print"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two CSS colours, as the WCAG define it."""
    lights = []
    for color in (one, other):
        parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_the_scheme_is_followed_and_text_stands_out_from_its_ground(
    run: Callable[..., Any],
) -> None:
    """Text has at least the contrast that WCAG asks for: 4.5 to 1."""
    dark, ground, colors = run(
        """const texts = ["p.lead", "td", "h2", "a", "figure text", "dd", "figcaption"];
        return [matchMedia("(prefers-color-scheme: dark)").matches, getComputedStyle(document.body).backgroundColor,
            texts.map(what => {
                const style = getComputedStyle(document.querySelector(what));
                return what === "figure text" ? style.fill : style.color;
            })];"""
    )
    assert contrast(ground, "rgb(255, 255, 255)") > 10 if dark else ground == "rgb(255, 255, 255)"
    assert min(contrast(color, ground) for color in colors) >= 4.5
