"""Open pages of the documentation in a real browser.

This needs Chromium and its driver: `apt-get install chromium chromium-driver`. If one of them is
missing, the tests with the mark `WITHOUT` are skipped.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install selenium"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WITHOUT = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no chromium and chromedriver to open pages in: "
    "apt-get install chromium chromium-driver",
)
ATTEMPTS = 3  # on a busy machine, the driver can stop waiting before the browser starts
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


@contextmanager
def opened() -> Iterator[Any]:
    """Start the browser, and stop it at the end of the `with` block."""
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
    try:
        yield driver
    finally:
        driver.quit()


def set_screen(
    browser: Any, width: int, *, scheme: str = "light", media: str = "screen", mobile: bool = False
) -> None:
    """Set the size of the browser's screen, or make it show pages as if they were printed.

    Args:
        browser: The browser.
        width: The width of pages in CSS pixels.
        scheme: The colours that the user prefers, "light" or "dark".
        media: Where the pages are shown, "screen" or "print".
        mobile: Whether the screen is that of a phone.
    """
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [feature]})


def show(browser: Any, file: Path) -> None:
    """Open a file in the browser."""
    browser.get(file.as_uri())
