"""What the README promises, done as it says."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_is_the_one_in_the_examples_folder() -> None:
    example = (ROOT / "examples/fit.py").read_text()
    code = example.split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    result = runpy.run_path(str(ROOT / "examples/fit.py"))
    assert result["run"].accuracy > 0.95
    assert "checkpoint runs/" in capsys.readouterr().out


def test_every_file_the_documents_point_to_exists() -> None:
    import re

    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert len(documents) >= 5
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_option_is_documented() -> None:
    from convoy.config import FIELDS

    text = (ROOT / "docs/options.md").read_text()
    for name, field in FIELDS.items():
        assert f"`{name}`" in text, name
        assert field.metadata["help"] in text, name
