"""`convoy report` and `convoy runs compare`: files to keep, and mistakes told in a line."""

import fcntl
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import convoy.machine
from tests.browser.chromium import Browser, chromium, needs_chromium
from tests.cli.conftest import Refused
from tests.conftest import Outcome
from tests.monitor.reports.made_runs import events, make_run

Convoy = Callable[..., Outcome]

HOSTILE = "<script>alert(1)<"  # a folder's name has no /


def embedded(path: Path) -> Any:
    """Return the data in a report."""
    found = re.search(r'id="snapshot">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# ---------------------------------------------------------------- report


def test_a_report_lies_in_the_run_s_folder(convoy: Convoy) -> None:
    make_run(Path("runs/a"), events())
    outcome = convoy("report", "runs/a")
    assert (outcome.code, outcome.out, outcome.err) == (0, "wrote runs/a/report.html\n", "")
    data = embedded(Path("runs/a/report.html"))
    assert (data["run"]["name"], data["run"]["state"]) == ("a", "finished")
    assert convoy("report", "runs/a").code == 0  # again, over the old one


def test_a_report_elsewhere_with_pictures_and_as_json(convoy: Convoy) -> None:
    make_run(Path("a"), events())
    outcome = convoy("report", "a", "--out", "b.html", "--png", "pictures", "--json")
    assert outcome.code == 0
    told = json.loads(outcome.out)
    assert told == {
        "run_dir": "a",
        "state": "finished",
        "test_accuracy": 0.8,
        "report": "b.html",
        "pictures": [str(Path(picture)) for picture in told["pictures"]],
    }
    assert sorted(told["pictures"]) == sorted(map(str, Path("pictures").iterdir()))
    assert not Path("a/report.html").exists()


def test_a_run_is_gone_unless_a_process_holds_it(convoy: Convoy) -> None:
    run = make_run(Path("a"), events(ended=False))
    assert json.loads(convoy("report", run, "--json").out)["state"] == "gone"
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert json.loads(convoy("report", run, "--json").out)["state"] == "running"


def test_a_run_is_named_after_its_folder(convoy: Convoy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(Path("a"), events()))
    assert convoy("report", ".").code == 0
    assert embedded(Path("report.html"))["run"]["name"] == "a"


def test_report_refuses_what_it_cannot_do(refused: Refused) -> None:
    make_run(Path("a"), events())
    make_run(Path("empty"), [])
    Path("empty/events.jsonl").unlink()
    refused("report", words=("requires an argument",))
    refused("report", "nowhere", words=("holds no run of Convoy", "nowhere"))
    refused("report", "empty", words=("no events", "empty/events.jsonl"))
    refused("report", "a", "--out", "empty", words=("it is a folder",))
    refused("report", "a", "--out", "b/c.html", words=("folder does not exist",))
    refused("report", "a", "--png", "a/config.toml", words=("pictures go into a folder",))


def test_without_matplotlib_pictures_are_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(Path("a"), events())
    make_run(Path("b"), events())
    monkeypatch.setattr(convoy.machine, "find_spec", lambda _: None)
    hint = ("pictures need matplotlib", "pip install")
    refused("report", "a", "--png", "x", words=hint, code=3)
    refused("runs", "compare", "a", "b", "--png", "x.png", words=hint, code=3)


# ---------------------------------------------------------------- compare


def test_compare_prints_tables(convoy: Convoy) -> None:
    make_run(Path("x/a"), events())
    make_run(Path("y/a"), events(accuracies=(0.6, 0.75), ended=False), lr=0.25)
    outcome = convoy("runs", "compare", "x/a", "y/a")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[1][:7] == ["x/a", "finished", "lenet5", "lockstep", "3", "80.00%", "80.00%"]
    assert lines[1][7:11] == ["31.0", "s", "30.0", "s"]
    assert lines[2][:2] == ["y/a", "gone"]
    assert "every run reaches, 75.00%" in outcome.out
    assert ["lr", "0.05", "0.25"] in lines


def test_compare_as_json_and_as_files(convoy: Convoy) -> None:
    make_run(Path("[red]a"), events())
    make_run(Path(HOSTILE), events(accuracies=(0.6, 0.75)))
    asked = ("runs", "compare", "[red]a", HOSTILE, "--html", "c.html", "--png", "c.png")
    told = json.loads(convoy(*asked, "--json").out)
    assert [row["run"] for row in told["runs"]] == ["[red]a", HOSTILE]
    assert told["common_accuracy"] == 0.75
    assert told["differences"] == {}
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    assert "<script" not in Path("c.html").read_text()
    outcome = convoy(*asked)
    assert "[red]a" in outcome.out
    assert outcome.out.splitlines()[-3:] == [
        "all options are the same",
        "wrote c.html",
        "wrote c.png",
    ]


def test_compare_refuses_what_it_cannot_do(refused: Refused) -> None:
    make_run(Path("a"), events())
    make_run(Path("b"), [])
    Path("b/events.jsonl").unlink()
    refused("runs", "compare", words=("at least two runs",))
    refused("runs", "compare", "a", words=("at least two runs",))
    refused("runs", "compare", "a", "./a", words=("named twice", "'a'"))
    refused("runs", "compare", "a", "b", words=("no events",))
    refused("runs", "compare", "a", "nowhere", words=("holds no run",))
    refused("runs", "compare", "a", "b", "--html", "a", words=("it is a folder",))
    refused("runs", "compare", "a", "b", "--png", "x/y.png", words=("folder does not exist",))


# ---------------------------------------------------------------- in a browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as found:
        yield found


def open_file(browser: Browser, path: Path) -> None:
    browser.open(path.resolve().as_uri())
    assert browser.errors() == []


def shown(browser: Browser, field: str) -> str:
    """Return what the page says in a field, once it says something."""
    browser.wait(lambda: browser.text(field), field)
    return browser.text(field)


@needs_chromium
def test_a_browser_shows_the_report_from_a_file(convoy: Convoy, browser: Browser) -> None:
    names = ("<img src=x onerror=document.title='broken'>", "</script>\"'", "node 3")
    make_run(Path(HOSTILE), events(names))
    assert convoy("report", HOSTILE, "--out", "report.html").code == 0
    open_file(browser, Path("report.html"))
    assert "80.00" in shown(browser, "test-accuracy")
    assert "finished" in shown(browser, "state")
    assert shown(browser, "run-name") == HOSTILE
    table = shown(browser, "nodes")
    assert all(name in table for name in names)
    assert len(browser.find_all("canvas")) >= 6
    assert browser.find_all("img") == []
    assert "broken" not in browser.driver.title
    assert browser.errors() == []


@needs_chromium
def test_a_browser_runs_nothing_that_was_put_into_the_report(
    convoy: Convoy, browser: Browser
) -> None:
    make_run(Path("a"), events())
    assert convoy("report", "a", "--out", "report.html").code == 0
    page, put = Path("report.html"), "<script>document.title = 'broken'</script>"
    page.write_text(page.read_text().replace("<body>", f"<body>{put}"))
    browser.open(page.resolve().as_uri())
    assert "finished" in shown(browser, "state")
    assert "broken" not in browser.driver.title
    assert ["Content Security Policy" in told for told in browser.errors()] == [True]


@needs_chromium
def test_a_browser_shows_the_comparison_from_a_file(convoy: Convoy, browser: Browser) -> None:
    make_run(Path("a"), events())
    make_run(Path(HOSTILE), events(accuracies=(0.6, 0.75)))
    assert convoy("runs", "compare", "a", HOSTILE, "--html", "c.html").code == 0
    open_file(browser, Path("c.html"))
    text = browser.run("document.body.textContent")
    assert HOSTILE in text
    assert "75.00%" in text
    assert len(browser.find_all("path.curve")) == 6
