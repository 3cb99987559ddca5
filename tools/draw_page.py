"""Draw the pictures of the page from a real run of the main job, one of whose nodes is killed.

python -m tools.draw_page docs/images      (needs chromium and chromedriver)
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.browser.chromium import Browser, chromium
from tests.browser.watched import watch
from tests.conftest import start_convoy

MAIN_JOB = Path(__file__).parents[1] / "examples/unequal.toml"
KILLED = 1  # in the second epoch; it comes back by itself
SIZES = {"desktop": (1280, 1560), "phone": (390, 1560)}


def draw(folder: Path) -> None:
    """Train, disturb, and draw in the fourth epoch."""
    with TemporaryDirectory() as place, chromium(Path(place, "profile")) as browser:
        run = Path(place, "unequal")
        training = start_convoy("train", MAIN_JOB, "--out", run, "--quiet")
        try:
            _wait(run, "group", 1)
            with watch(run) as page:
                browser.open(page.link)
                _wait(run, "evaluation", 1)
                time.sleep(4.0)
                os.kill(_pid(run, KILLED), signal.SIGKILL)
                _wait(run, "evaluation", 3)
                time.sleep(3.0)
                _draw_all(browser, folder)
        finally:
            training.terminate()
            training.communicate()


def _draw_all(browser: Browser, folder: Path) -> None:
    for name, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            browser.size(width, height)
            browser.prefer(scheme)
            time.sleep(1.0)  # charts follow a new size a moment later
            browser.driver.save_screenshot(str(folder / f"watch-{name}-{scheme}.png"))


def _events(run: Path) -> Iterator[dict[str, Any]]:
    if (run / "events.jsonl").exists():
        text = (run / "events.jsonl").read_text()
        yield from map(json.loads, text[: text.rfind("\n") + 1].splitlines())


def _wait(run: Path, kind: str, count: int) -> None:
    """Wait until something was told of so often."""
    while sum(event["event"] == kind for event in _events(run)) < count:
        time.sleep(0.1)


def _pid(run: Path, node: int) -> int:
    joins = [event for event in _events(run) if event["event"] == "join"]
    return int([event["pid"] for event in joins if event["node"] == node][-1])


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
