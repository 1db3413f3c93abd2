"""Tokens from a file or the environment."""

import pytest

from esm_turbo.serve.tokens import VARIABLE, read_tokens

GOOD = "abcdefghijklmnop"


def test_tokens_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "tokens"
    path.write_text(f"# the group's\n{GOOD}\n\n  {GOOD}-2==  \n")
    monkeypatch.setenv(VARIABLE, "not-read-at-all-here")
    assert read_tokens(path) == [GOOD, f"{GOOD}-2=="]


def test_tokens_of_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{GOOD} {GOOD}2")
    assert read_tokens(None) == [GOOD, f"{GOOD}2"]
    monkeypatch.delenv(VARIABLE)
    assert read_tokens(None) == []


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_a_blank_variable_does_not_open_the_service(monkeypatch, blank):
    monkeypatch.setenv(VARIABLE, blank)
    with pytest.raises(ValueError, match="ESM_TURBO_TOKENS: holds no token; give one, or unset it"):
        read_tokens(None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; check the path"),
        (b"", "holds no token"),
        (b"# only a comment\n", "holds no token"),
        (b" \n\t\n", "tokens: holds no token; give one a line"),
        (b"short\n", "token 1 must have 16 to 512"),
        (GOOD.encode() + b"\ntwo words in a line!\n", "token 2 must have 16 to 512"),
        (b"\xff" * 20, "is not text"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_tokens(path)
    assert GOOD not in str(error.value)
