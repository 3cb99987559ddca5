"""Short names stand for things, and a user's own callable has a door."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.errors import ConfigError
from convoy.registry import Entry, Registry, is_user_target, load_user_callable


@pytest.fixture
def registry() -> Registry[Callable[..., object]]:
    return Registry(
        "thing",
        {
            "ordered": Entry("collections:OrderedDict", "keeps the order"),
            "broken": Entry("no_such_module_at_all:x", "is never imported unless asked for"),
        },
    )


def test_a_name_gives_what_it_stands_for(registry: Registry[Callable[..., object]]) -> None:
    assert registry.get("ordered") is OrderedDict


def test_only_the_target_asked_for_is_imported(registry: Registry[Callable[..., object]]) -> None:
    registry.get("ordered")
    registry.check("broken")
    with pytest.raises(ModuleNotFoundError):
        registry.get("broken")


def test_a_registry_lists_names_and_descriptions(
    registry: Registry[Callable[..., object]],
) -> None:
    assert list(registry) == ["ordered", "broken"]
    assert "ordered" in registry
    assert "other" not in registry
    assert registry.describe()["ordered"] == "keeps the order"


@pytest.mark.parametrize("ask", ["check", "get"])
def test_an_unknown_name_is_refused_with_the_known_ones_and_the_closest(
    registry: Registry[Callable[..., object]], ask: str
) -> None:
    with pytest.raises(ConfigError, match="unknown thing") as caught:
        getattr(registry, ask)("orderd")
    message = str(caught.value)
    assert "'orderd'" in message
    assert "ordered, broken" in message
    assert "Did you mean 'ordered'?" in message


def test_a_name_close_to_none_gets_no_suggestion(
    registry: Registry[Callable[..., object]],
) -> None:
    with pytest.raises(ConfigError, match=r"ordered, broken$"):
        registry.check("zzz")


@pytest.mark.parametrize("name", ["a:b", "package.module:make", "_x:_y"])
def test_module_colon_callable_is_a_user_target(name: str) -> None:
    assert is_user_target(name)


@pytest.mark.parametrize(
    "name", ["", "a", ":", "a:", ":b", "a:b:c", "a-b:c", "a:b-c", "a..b:c", "/a:b", "a.b:c.d"]
)
def test_anything_else_is_no_user_target(name: str) -> None:
    assert not is_user_target(name)


def test_a_users_callable_is_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "registry_good.py").write_text("def make():\n    return 7\n")
    assert load_user_callable("registry_good:make", "model")() == 7


def test_the_working_directory_is_searched_before_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, number in (("elsewhere", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "registry_twice.py").write_text(f"def make():\n    return {number}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *sys.path])
    monkeypatch.chdir(tmp_path / "here")
    assert load_user_callable("registry_twice:make", "model")() == 2


def test_a_module_in_a_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "registry_package").mkdir()
    (tmp_path / "registry_package" / "inner.py").write_text("make = dict\n")
    assert load_user_callable("registry_package.inner:make", "model") is dict


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model 'registry_absent:make' cannot be imported"):
        load_user_callable("registry_absent:make", "model")


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("registry_raises", "raise ValueError('my reason')\n", "ValueError: my reason"),
        ("registry_syntax", "def make(:\n", "SyntaxError"),
        ("registry_needs", "import no_such_module_at_all\n", "ModuleNotFoundError"),
    ],
)
def test_a_module_that_fails_is_refused_with_its_reason(
    tmp_path: Path, module: str, text: str, reason: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_user_callable(f"{module}:make", "data set")


def test_a_missing_attribute_is_refused_with_the_closest_callable(tmp_path: Path) -> None:
    (tmp_path / "registry_typo.py").write_text("make_net = dict\nmake_nes = 3\n")
    with pytest.raises(ConfigError, match=r"has no 'make_ne'. Did you mean 'make_net'\?"):
        load_user_callable("registry_typo:make_ne", "model")


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry_number.py").write_text("make = 3\n")
    with pytest.raises(ConfigError, match="'registry_number:make' is not callable; got 'int'"):
        load_user_callable("registry_number:make", "model")
