"""A headless Chromium for tests, and what they ask of it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

_CHROMIUM, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (_CHROMIUM and _DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)


class Browser:
    """A window with one page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Open a page."""
        self.driver.get(address)

    def size(self, width: int, height: int) -> None:
        """Give the page so many pixels, as a phone or a screen does."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Let the system ask for dark or light."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> WebElement:
        """Return the one element that is meant."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        """Return all elements that are meant."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        """Return what stands in the element with a `data-test` name."""
        return str(self.find(f'[data-test="{name}"]').text)

    def run(self, script: str) -> Any:
        """Return what a piece of script gives."""
        return self.driver.execute_script(f"return ({script})")

    def cells(self, selector: str, attribute: str) -> list[str]:
        """Return an attribute of all elements that are meant, read at one moment."""
        query = json.dumps(selector)
        found = self.run(
            f"[...document.querySelectorAll({query})].map(e => e.getAttribute('{attribute}'))"
        )
        return [str(value) for value in found]

    def errors(self) -> list[str]:
        """Return what the console complains of since the last time."""
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def wait(self, holds: Callable[[], object], what: str, limit_s: float = 15.0) -> float:
        """Wait until something holds; return how long that took."""
        started = time.monotonic()
        while not _now(holds):
            assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {what}"
            time.sleep(0.05)
        return time.monotonic() - started

    def picture(self, path: Path) -> None:
        """Save the whole page as it looks."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("document.documentElement.clientWidth")
        self.size(int(width), int(height))
        time.sleep(0.6)  # charts follow a new size a moment later
        self.driver.save_screenshot(str(path))


def _now(holds: Callable[[], object]) -> object:
    """Ask, and take an element that is being replaced at this moment for a no."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    try:
        return holds()
    except (NoSuchElementException, StaleElementReferenceException):
        return False


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser that nobody sees."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.add_argument("--hide-scrollbars")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(_CHROMIUM)
    driver = webdriver.Chrome(options=options, service=Service(str(_DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
