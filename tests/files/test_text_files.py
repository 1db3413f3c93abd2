"""Text files: plain and gzip alike, and damaged ones."""

import gzip

import pytest

from esm_turbo.files.text_files import DamagedGzipError, text_lines

CONTENT = "\ufeffone\r\ntwo ä\nthree"


@pytest.mark.parametrize("encode", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_lines(tmp_path, encode):
    path = tmp_path / "text"
    path.write_bytes(encode(CONTENT.encode()))
    assert list(text_lines(path)) == ["one\n", "two ä\n", "three"]
    assert list(text_lines(path, newline="")) == ["one\r\n", "two ä\n", "three"]


def test_damage(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(gzip.compress(CONTENT.encode())[:-4])
    with pytest.raises(DamagedGzipError, match="the gzip file is truncated or damaged"):
        list(text_lines(path))
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UnicodeDecodeError):
        list(text_lines(path))
    with pytest.raises(FileNotFoundError):
        list(text_lines(tmp_path / "none"))
