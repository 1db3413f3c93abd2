"""What files and folders hold, without reading them."""

import gzip
import io

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.files.kinds import binary_kind, is_checkpoint, is_embeddings, is_store


def torch_file():
    file = io.BytesIO()
    torch.save({"x": torch.zeros(2)}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", None),
        (b"id,score\na,1\n", None),
        (b"{}\n", None),
        ("café".encode("latin-1"), None),
        (gzip.compress(b"x"), "a binary file"),
        (torch_file(), "a binary file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "a binary file"),
        (b"PAR1" + bytes(8), "a Parquet file"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a picture"),
        (b"%PDF-1.4\n", "a picture"),
        (b"\x02\0\0\0\0\0\0\0{", "a damaged file of tensors"),
    ],
    ids=["empty", "csv", "json", "latin", "gzip", "pt", "hdf5", "parquet", "png", "pdf", "cut"],
)
def test_binary_files_are_recognised(tmp_path, content, kind):
    path = tmp_path / "x"
    path.write_bytes(content)
    assert binary_kind(path) == kind


def test_kinds_of_safetensors_files(tmp_path):
    assert binary_kind(EMBEDDED_MODEL / "calibration.safetensors") == "a calibration"
    save_file({"x": np.zeros(2)}, tmp_path / "x")
    assert binary_kind(tmp_path / "x") == "a file of tensors"
    assert binary_kind(tmp_path) is None
    assert binary_kind(tmp_path / "absent") is None


def test_folders(tmp_path):
    assert is_checkpoint(EMBEDDED_MODEL)
    for check in (is_checkpoint, is_store, is_embeddings):
        assert not check(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint(tmp_path)
    (tmp_path / "vocab.txt").write_text("")
    assert is_checkpoint(tmp_path)
