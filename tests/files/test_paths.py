"""Checks of outputs before any work is done."""

import os

import pytest

from esm_turbo.files.paths import NotWritableError, check_apart, check_writable, is_device


@pytest.mark.parametrize("name", ["x", "new/folder/x", "old", "link", "dangling"])
def test_writable_paths_pass_and_nothing_is_left(tmp_path, name):
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "dangling").symlink_to("absent")
    before = sorted(tmp_path.iterdir())
    check_writable(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old").read_text() == "old"


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(NotWritableError, match=f"{tmp_path}: is a folder; name a file"):
        check_writable(tmp_path)


def test_a_path_inside_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritableError, match=f"cannot be written \\({tmp_path}/file is not a folder\\)"):
        check_writable(tmp_path / "file" / "x")


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(NotWritableError, match=r"x: cannot be written \(Permission denied\); choose another path"):
        check_writable(tmp_path / "x")


def test_devices_and_pipes(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    assert is_device(tmp_path / "pipe") and is_device(os.devnull)
    assert not is_device(tmp_path) and not is_device(tmp_path / "absent")
    # Not opened, which would block without a reader.
    check_writable(tmp_path / "pipe")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotWritableError, match="Permission denied"):
        check_writable(tmp_path / "pipe")


def test_outputs_are_apart_from_inputs_and_each_other(tmp_path):
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    first.write_text("")
    link.symlink_to(first)
    check_apart([second, tmp_path / "third"], [first, first])
    check_apart([os.devnull, os.devnull], [os.devnull])
    for alias in (first, link, tmp_path / "x" / ".." / "first"):
        with pytest.raises(NotWritableError, match="is an input of this command"):
            check_apart([second, alias], [first])
    with pytest.raises(NotWritableError, match="is named for two outputs"):
        check_apart([second, tmp_path / "x" / ".." / "second"], [first])
