"""A run's report: the numbers of its events, in one file that lets nothing else in."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import ConfigError, StorageError
from convoy.monitor.reports.bundle import bundle
from convoy.monitor.reports.modules import BundleError, join_modules
from convoy.monitor.reports.past import read_view
from convoy.monitor.reports.report import report_page, write_report
from convoy.monitor.view import RunView
from tests.monitor.reports.made_runs import ACCURACIES, START, events, records

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a\"b'c&amp;<!--",
    "]]>\u2028 onload=x ${y} `z` \\u003c",
)


def view_of(names: Sequence[str] = ("node 1", "node 2"), name: str = "a run") -> RunView:
    """Return the view of a run made by hand."""
    view = RunView(name)
    for record in records(events(names)):
        view.take(record)
    return view


def embedded(page: str) -> Any:
    """Return the data in a page."""
    found = re.findall(r'<script type="application/json" id="snapshot">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


# ---------------------------------------------------------------- numbers


def test_the_numbers_of_the_report_are_those_of_the_events() -> None:
    Path("events.jsonl").write_text("\n".join(map(json.dumps, records(events()))))
    data = embedded(report_page(read_view(Path("events.jsonl"), "a run")))
    lines = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    tests = [line for line in lines if line["event"] == "evaluation"]
    columns = data["series"]["test"]["columns"]
    assert columns["test_accuracy"] == [line["test_accuracy"] for line in tests]
    assert columns["test_loss"] == [line["test_loss"] for line in tests]
    assert columns["time"] == [round(line["time"] - START, 3) for line in tests]
    assert data["progress"]["best_test_accuracy"] == max(ACCURACIES)
    assert data["run"]["state"] == "finished"
    trained = [sum(line["samples"][1] for line in lines if line["event"] == "nodes")]
    assert [data["nodes"][1]["samples"]] == trained


def test_a_number_that_is_none_does_not_break_the_page() -> None:
    view, lines = RunView("a run"), records(events())
    for line in lines:
        view.take({**line, "loss": float("nan")} if line["event"] == "step" else line)
    assert set(embedded(report_page(view))["series"]["train"]["columns"]["loss"]) == {None}


# ---------------------------------------------------------------- text stays text


def test_hostile_names_stay_text() -> None:
    plain, page = report_page(view_of()), report_page(view_of(HOSTILE, HOSTILE[0]))
    data = embedded(page)
    assert data["run"]["name"] == HOSTILE[0]
    assert tuple(node["name"] for node in data["nodes"]) == HOSTILE
    without = re.sub(r'(id="snapshot">).*?(</script>)', r"\1\2", page, flags=re.S)
    assert without == re.sub(r'(id="snapshot">).*?(</script>)', r"\1\2", plain, flags=re.S)


def test_the_policy_lets_in_what_the_page_holds_and_nothing_else() -> None:
    page = report_page(view_of(HOSTILE))
    policy = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert len(policy) == 1
    rules = dict(rule.split(" ", 1) for rule in policy[0].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    executed = r'<script(?: type="module")?>(.*?)</script>'
    for kind, pattern in (("script", executed), ("style", r"<style>(.*?)</style>")):
        contents = re.findall(pattern, page, re.S)
        assert len(contents) == 2  # uPlot's, and the page's own
        digests = [hashlib.sha256(content.encode()).digest() for content in contents]
        wanted = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert rules[f"{kind}-src"].split() == wanted
    assert page.index(policy[0]) < page.index("<style>")
    assert page.index('charset="utf-8"') < 1024


def test_the_report_names_no_other_file_and_brings_the_licence_along() -> None:
    page = report_page(view_of())
    assert "static/" not in page
    assert not re.search(r"^\s*(import|export)\b", page, re.M)
    assert "Leon Sorokin" in page  # uPlot's licence asks for it


# ---------------------------------------------------------------- reading back


def test_torn_and_damaged_lines_are_passed_over() -> None:
    lines = [json.dumps(record).encode() for record in records(events())]
    damage = [b"\xff\xfe", b"[1]", b"{}", b'{"event":"x"}', b"", b"[" * 9999, b'{"time":1e999}']
    Path("whole").write_bytes(b"\n".join(lines))
    Path("damaged").write_bytes(b"\n".join([*damage, *lines, *damage, lines[3][:50]]))
    whole, damaged = (read_view(Path(name), "x").snapshot() for name in ("whole", "damaged"))
    assert whole == damaged
    assert whole["counts"]["events"] == len(lines)


def test_no_events_is_a_clear_mistake() -> None:
    with pytest.raises(ConfigError, match="no events"):
        read_view(Path("events.jsonl"), "x")
    Path("events.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_view(Path("events.jsonl"), "x")


def test_a_report_that_cannot_be_written_says_so() -> None:
    with pytest.raises(StorageError, match="could not be written"):
        write_report(view_of(), Path("no/such/folder/report.html"))


# ---------------------------------------------------------------- the bundler

PAGE = """<!doctype html><html><head><meta charset="utf-8">
<link rel="stylesheet" href="static/a.css"></head><body>
<script src="static/plain.js"></script><script type="module" src="static/main.js"></script>
</body></html>"""
FILES = {
    "index.html": PAGE,
    "a.css": "p { color: red }",
    "plain.js": "var plain = 1;",
    "main.js": 'import { one, Two } from "./b.js";\nimport { zero } from "./c.js";\none(zero);',
    "b.js": 'import { zero } from "./c.js";\nexport function one() {}\nexport class Two {}',
    "c.js": "export const zero = 0;\n// nothing to import here\nconst important = zero;",
}


def bundle_of(**changed: str) -> str:
    """Return the bundle of a small page, with some of its files changed."""
    folder = Path("page")
    folder.mkdir(exist_ok=True)
    for name, text in {**FILES, **{k.replace("_", "."): v for k, v in changed.items()}}.items():
        (folder / name).write_text(text)
    return bundle(folder, {"x": 1})


def test_modules_come_in_the_order_they_need_each_other_and_once() -> None:
    page = bundle_of()
    script = page[page.index('<script type="module">') :]
    assert script.index("zero = 0") < script.index("function one") < script.index("one(zero)")
    assert script.count("zero = 0") == 1
    assert "import {" not in page
    assert "export " not in page
    assert "// nothing to import here" in page
    assert page.index("var plain") < page.index("one(zero)")
    assert embedded(page) == {"x": 1}


@pytest.mark.parametrize(
    "line",
    [
        'import * as all from "./c.js";',
        'import one from "./c.js";',
        'import "./c.js";',
        'import { zero as nothing } from "./c.js";',
        'import { zero } from "https://example.org/c.js";',
        'import {\n  zero,\n} from "./c.js";',
        "import { zero } from './c.js';",
        'const c = await import("./c.js");',
        "const here = import.meta.url;",
        'import { zero } from "../c.js";',
    ],
)
def test_an_import_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(BundleError, match=r"import is not known \(main.js, line 1\)"):
        bundle_of(main_js=line)


@pytest.mark.parametrize("line", ["export default 1;", "export { zero };", "export * from 'x';"])
def test_an_export_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(BundleError, match=r"export is not known \(c.js, line 1\)"):
        bundle_of(c_js=line)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"c_js": "export const other = 0;"}, "exports no 'zero'"),
        ({"c_js": 'import { one } from "./b.js";\nexport const zero = 0;'}, "import each other"),
        ({"c_js": "export const zero = 0;\nfunction one() {}"}, "both define 'one'"),
        ({"c_js": "export const zero = '</script>';"}, "would end or hide it"),
        ({"a_css": "p { background: url(https://example.org/x.png) }"}, "a stylesheet refers"),
        ({"a_css": "@import 'b.css';"}, "a stylesheet refers"),
        ({"main_js": 'import { x } from "./missing.js";'}, "cannot be read"),
        ({"index_html": PAGE.replace("<body>", '<body><img src="x.png">')}, "page refers to"),
        ({"index_html": PAGE.replace("<body>", "<body onload=x()>")}, "page refers to"),
        ({"index_html": PAGE.replace("<body>", "<body style='x'>")}, "page refers to"),
        ({"index_html": PAGE.replace('"static/a.css"', '"a.css"')}, "page refers to"),
        ({"index_html": PAGE.replace(' type="module"', "")}, "one module"),
    ],
)
def test_what_would_not_work_in_one_file_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        bundle_of(**changed)


def test_a_module_is_read_by_whoever_knows_where_it_lies() -> None:
    assert join_modules("only.js", {"only.js": "go();"}.__getitem__) == "// only.js\ngo();\n"
