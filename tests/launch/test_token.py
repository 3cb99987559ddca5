"""Tokens: long, new each time, and in files that their owners alone can read."""

import os
import stat
from pathlib import Path

import pytest

from convoy.errors import ConfigError
from convoy.launch.token import make_token, read_or_make_token, read_token


def _write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_tokens_hold_256_bits_and_differ() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_missing_file_is_made_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "token"
    former = os.umask(umask)
    try:
        token = read_or_make_token(path)
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert read_or_make_token(path) == token  # and it stays


def test_an_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = _write(tmp_path / "token", "  0123456789abcdefABCDEF\n\n")
    assert read_or_make_token(path) == "0123456789abcdefABCDEF"
    assert path.read_text() == "  0123456789abcdefABCDEF\n\n"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o610, 0o601, 0o644, 0o666, 0o777])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = _write(tmp_path / "token", "0" * 64, mode)
    with pytest.raises(ConfigError, match=r"others may read the token file; got .*chmod 600"):
        read_token(path)
    with pytest.raises(ConfigError, match="others may read"):
        read_or_make_token(path)


@pytest.mark.parametrize("text", ["", "\n", "0" * 15, "0" * 16 + " " + "0" * 16, "-" * 64])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"holds no token; got .*at least 16 letters"):
        read_token(_write(tmp_path / "token", text))


def test_the_content_of_a_wrong_file_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_token(_write(tmp_path / "token", "my secret!"))
    assert "secret" not in str(caught.value)


def test_files_that_cannot_be_read_or_made_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*; got .*none"):
        read_token(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(_write(tmp_path / "bytes", b"\xff" * 64))
    with pytest.raises(ConfigError, match=r"cannot be written: .*; got"):
        read_or_make_token(tmp_path / "none/token")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_or_make_token(tmp_path / "link")  # nothing is written through a link
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("token", ["q83vEjRWeJCrze8SNFZ4kKvN7xI=", "a_b-c_d-e_f-g_h-", "a+b/" * 11])
def test_tokens_of_other_tools_are_taken(tmp_path: Path, token: str) -> None:
    assert read_token(_write(tmp_path / "token", token + "\n")) == token


def test_letters_that_cannot_travel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(_write(tmp_path / "token", "ä" * 20))
