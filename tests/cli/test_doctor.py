"""`convoy doctor`: what this machine has, and exit code 3 where it lacks what is needed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convoy import checkup
from convoy.checkup import Checkup, Finding
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]


def pretend(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Let the examination find these things."""
    made = Checkup(list(findings), {"lenet5": 1.0}, {"cores": 2}, {"torch": "2"})
    monkeypatch.setattr("convoy.checkup.examine", lambda: made)


@pytest.fixture
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.inner.probe._BUDGET_S", 0.001)
    monkeypatch.setattr("convoy.checkup._SPEED_PROBES", (("lenet5", (1, 28, 28)),))


@pytest.mark.usefixtures("_short_probe")
def test_json_has_findings_speeds_machine_and_versions(convoy: Convoy) -> None:
    outcome = convoy("doctor", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    record = json.loads(outcome.out)
    assert list(record) == ["findings", "speeds", "machine", "versions"]
    names = [finding["name"] for finding in record["findings"]]
    for name in (
        "torch",
        "processor",
        "GPU",
        "bf16",
        "tasks",
        "runs",
        "image cache",
        "data: mnist",
    ):
        assert name in names
    assert "speed of lenet5" in names
    assert record["speeds"]["lenet5"] > 0


@pytest.mark.usefixtures("_short_probe")
def test_examination_leaves_nothing_in_the_working_folder(convoy: Convoy, tmp_path: Path) -> None:
    assert convoy("doctor", "--json").code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_short_probe")
def test_torch_that_is_too_old_is_a_problem(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.checkup.torch.__version__", "2.9.1+cpu")
    outcome = convoy("doctor")
    assert outcome.code == 3
    assert "2.9.1+cpu (needs 2.10 or newer)" in outcome.err


@pytest.mark.usefixtures("_short_probe")
def test_cache_that_cannot_be_written_is_no_problem(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    outcome = convoy("doctor", "--json")
    assert outcome.code == 0
    (cache,) = (f for f in json.loads(outcome.out)["findings"] if f["name"] == "image cache")
    assert not cache["good"]
    assert "cannot be written" in cache["text"]


def test_table_marks_what_is_good_and_what_is_not(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, Finding("torch", True, "[2.10]"), Finding("GPU", False, "none"))
    outcome = convoy("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert [line.split() for line in outcome.out.splitlines()] == [
        ["ok", "torch", "[2.10]"],
        ["no", "GPU", "none"],
    ]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_something_needed_that_is_missing_ends_with_3(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    pretend(monkeypatch, Finding("runs", False, "/x cannot be written: full", needed=True))
    outcome = convoy("doctor", *flags)
    assert outcome.code == 3
    assert outcome.err == (
        "convoy: error: this machine is not fit to train: /x cannot be written: full\n"
    )
    assert "/x cannot be written" in outcome.out


@pytest.mark.parametrize(
    ("compiler", "capability", "amx", "good", "words"),
    [
        ("no-such-compiler", "AVX512", True, False, "no C++ compiler"),
        ("sh", "AVX2", False, True, "convolutions are PyTorch's"),
        ("sh", "AVX512", False, True, "vectors of 512 bits"),
        ("sh", "AVX512", True, True, "bits, in bf16 on a matrix unit"),
    ],
)
def test_what_tasks_find_here_is_told(
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    capability: str,
    amx: bool,
    good: bool,
    words: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    found = checkup._tasks()
    assert (found.name, found.good) == ("tasks", good)
    assert words in found.text
    assert amx or not found.good or "matrix" not in found.text
