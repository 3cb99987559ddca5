"""`--help`: quick, and complete."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from convoy.config import FIELDS, HINTS
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["bench", "--help"],
        ["trace", "--help"],
        ["plan", "--help"],
        ["train", "--lr", "x"],
    ],
)
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from convoy.cli.app import run; "
        f"run({arguments!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, convoy; assert 'torch' not in sys.modules; assert 'fit' in dir(convoy)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_the_program_leaves_with_the_code_of_its_command() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "convoy", "train", "--eopchs", "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("convoy: error: Unknown option")


@pytest.fixture
def train_help(convoy: Convoy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the help of `convoy train`, wide enough that no name is broken."""
    monkeypatch.setenv("COLUMNS", "200")
    return convoy("train", "--help").out


def test_every_field_of_the_config_is_an_option(train_help: str) -> None:
    words = train_help.split()
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in words
    for name in ("--resume", "--json", "--quiet"):
        assert name in words


def test_every_option_shows_its_meaning_and_its_default(train_help: str) -> None:
    text = " ".join(train_help.replace("│", " ").split())
    for name, field in FIELDS.items():
        assert field.metadata["help"].split("(")[0].strip() in text, name
    for default in ("fashion-mini", "0.05", "0.0005", "cosine"):
        assert f"[default: {default}]" in text


def test_every_switch_has_its_negation(train_help: str) -> None:
    for name in (name for name in HINTS if HINTS[name] is bool):
        assert f"--no-{name.replace('_', '-')}" in train_help


def test_all_groups_are_shown(train_help: str) -> None:
    for group in ("Data", "Model", "Training", "Machine", "Output"):
        assert f"─ {group} ─" in train_help


def test_every_command_is_listed(convoy: Convoy) -> None:
    shown = convoy("--help").out
    for command in ("train", "runs", "trace", "bench", "doctor"):
        assert f" {command} " in shown
