"""Checks of outputs before any work is done."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from esm_turbo.files.paths import NotWritableError, Output, check_outputs, check_writable, is_device


@pytest.mark.parametrize("name", ["x", "new/folder/x", "old", "link", "dangling"])
def test_writable_paths_pass_and_nothing_is_left(tmp_path, name):
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "dangling").symlink_to("absent")
    before = sorted(tmp_path.iterdir())
    check_writable(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old").read_text() == "old"


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with pytest.raises(NotWritableError, match=f"{tmp_path}: is a folder; name a file"):
        check_writable(tmp_path)
    with pytest.raises(NotWritableError, match=f"cannot be written \\({tmp_path}/file is not a folder\\)"):
        check_writable(tmp_path / "file" / "x")
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
    check(second, tmp_path / "third", reads=[first, first])
    check(os.devnull, os.devnull, reads=[os.devnull])
    for alias in (first, link, tmp_path / "x" / ".." / "first"):
        with pytest.raises(NotWritableError, match="is an input of this command"):
            check(second, alias, reads=[first])
    with pytest.raises(NotWritableError, match="is another output"):
        check(second, tmp_path / "x" / ".." / "second", reads=[first])


def test_names_that_differ_in_case_may_be_one_file(tmp_path, monkeypatch):
    (tmp_path / "a.fasta").write_text("")
    (tmp_path / "A.fasta").write_text("")
    check(tmp_path / "A.fasta", reads=[tmp_path / "a.fasta"])
    monkeypatch.setattr(os.path, "samefile", lambda *_: True)
    with pytest.raises(NotWritableError, match="is an input"):
        check(tmp_path / "A.fasta", reads=[tmp_path / "a.fasta"])


def checkpoint(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")


def store(folder):
    folder.mkdir()
    (folder / "store.safetensors").write_text("")


def embeddings(folder):
    folder.mkdir()
    (folder / "index.tsv").write_text("")
    (folder / "settings.json").write_text("")


@pytest.mark.parametrize(
    ("make", "kind", "own"),
    [
        (checkpoint, "the folder of a model", ()),
        (store, "a store of contexts", ("contexts",)),
        (embeddings, "a folder of embeddings", ("embeddings",)),
    ],
)
def test_no_output_lies_in_an_artifact(tmp_path, make, kind, own):
    folder = tmp_path / "artifact"
    make(folder)
    (tmp_path / "link").symlink_to(folder)
    for holds in ("text", "calibration", "HDF5"):
        for place in (folder / "x", tmp_path / "link" / "x"):
            with pytest.raises(NotWritableError, match=f"{place}: lies in {folder}, {kind}; name another path"):
                check(place, holds=holds)
    for holds in ("embeddings", "contexts"):
        with pytest.raises(NotWritableError, match=f"lies in {folder}, {kind}"):
            check(folder / "x", holds=holds)
        if holds in own:
            check(folder, holds=holds)
        else:
            with pytest.raises(NotWritableError, match=f"{folder}: is {kind}; name another path"):
                check(folder, holds=holds)


def test_a_calibration_may_be_that_of_its_model(tmp_path):
    folder = tmp_path / "model"
    checkpoint(folder)
    check(folder / "calibration.safetensors", reads=[folder], holds="calibration")
    for name in ("model.safetensors", "other.safetensors"):
        with pytest.raises(NotWritableError, match="an input of this command"):
            check(folder / name, reads=[folder], holds="calibration")
    with pytest.raises(NotWritableError, match="an input of this command"):
        check(folder / "calibration.safetensors", reads=[folder], holds="text")


def test_outputs_do_not_lie_in_each_other(tmp_path):
    with pytest.raises(NotWritableError, match=r"x.json: lies in .*/new, another output"):
        check_outputs([Output(tmp_path / "new", "embeddings"), Output(tmp_path / "new" / "x.json", "text")], [])


def test_an_artifact_is_replaced_by_its_own_kind_only(tmp_path):
    path = tmp_path / "x"
    for kind, own in (("calibration", ("calibration",)), ("cache", ()), ("context", ())):
        save_file({"x": np.zeros(2)}, path, metadata={"kind": kind})
        for holds in ("text", "picture", "calibration"):
            if holds in own:
                check(path, holds=holds)
            else:
                with pytest.raises(NotWritableError, match=f"{path}: is a {kind}, which would be replaced"):
                    check(path, holds=holds)
    path.write_text("old results")
    check(path)


def test_a_picture_is_drawn_again(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"<svg></svg>")
    check(path, holds="picture")
    for content in (b"\x89PNG\r\n\x1a\n\0\0", b"%PDF-1.4\n"):
        path.write_bytes(content)
        check(path, holds="picture")
        for holds in ("text", "calibration"):
            with pytest.raises(NotWritableError, match="is a picture, which would be replaced; name another path"):
                check(path, holds=holds)


def check(*paths, reads=(), holds="text"):
    check_outputs([Output(path, holds) for path in paths], reads)
