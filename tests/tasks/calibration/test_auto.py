"""`calibration="auto"`: calibrates once, reads the file later, and calibrates again if it is unusable."""

import logging
import shutil

import pytest
import torch

from esm_turbo import Calibration, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.tasks.calibration import auto as auto_calibration
from esm_turbo.tasks.calibration.auto import auto_calibration as automatic


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder, with few shipped proteins."""
    fasta = tmp_path / "few.fasta"
    fasta.write_text(">a class=x\n" + "MKTAYIAKQRQISFVKSHFS" * 6 + "\n>b\n" + "GSGSWKDLAEPLLKRRVWTC" * 5 + "\n")
    monkeypatch.setattr(auto_calibration, "calibration_proteins", lambda: fasta)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_calibration, "calibration_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def runs(monkeypatch):
    """Arguments of every calibration that runs."""
    made = []
    original = auto_calibration.calibrate_records

    def counted(*args, **options):
        made.append(args)
        return original(*args, **options)

    monkeypatch.setattr(auto_calibration, "calibrate_records", counted)
    return made


@pytest.fixture
def make(turbo, tiny_esm):
    def make(seed=0, **config):
        return TurboEsm(TurboEsmForMaskedLM.from_esm(tiny_esm(seed=seed, **config), preset="exact"), turbo.tokenizer)

    return make


def same(a: Calibration, b: Calibration) -> bool:
    one, other = a.codec("paper").state, b.codec("paper").state
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_calibrated_once_and_read_later(folder, runs, make):
    first = automatic(make())
    [path] = folder.iterdir()
    assert path.suffix == ".safetensors"
    assert first.provenance["sequences"] == 2
    assert first.provenance["classes"]["x"] == {"sequences": 1, "residues": 120}
    again = automatic(make())
    assert len(runs) == 1
    assert same(first, again)
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_each_model_has_its_own_file(folder, runs, make):
    one, two, other_shape = automatic(make(0)), automatic(make(1)), automatic(make(0, layers=3))
    assert len(runs) == len(list(folder.iterdir())) == 3
    assert not same(one, two)
    assert same(automatic(make(1)), two)
    assert same(automatic(make(0, layers=3)), other_shape)
    assert len(runs) == 3


def test_another_dtype_reads_the_same_file(folder, runs, make):
    first = automatic(make())
    half = make()
    half.model.bfloat16()
    assert same(automatic(half), first)
    assert len(runs) == 1


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "other format"])
def test_a_damaged_file_is_replaced(folder, runs, make, damage, caplog):
    first = automatic(make())
    [path] = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "altered":
        data[-100] ^= 1
    elif damage == "other format":
        data = data.replace(b'"format_version":"', b'"format_version":"9', 1)
        data = data[:8] + data[8:]
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}.get(damage, data))
    with caplog.at_level(logging.WARNING, logger="esm_turbo"):
        again = automatic(make())
    assert len(runs) == 2
    assert same(first, again)
    assert path.name in caplog.text
    assert "is ignored" in caplog.text
    assert same(Calibration.load(path), first)


def test_a_file_of_another_model_is_not_used(folder, runs, make):
    automatic(make(0))
    [theirs] = folder.iterdir()
    mine = automatic(make(1))
    [path] = [p for p in folder.iterdir() if p != theirs]
    shutil.copy(theirs, path)
    assert same(automatic(make(1)), mine)
    assert len(runs) == 3
    assert same(Calibration.load(path), mine)


def test_a_folder_that_cannot_be_written(folder, runs, make, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="esm_turbo"):
        calibration = automatic(make())
    assert calibration.provenance["sequences"] == 2
    assert "cannot be saved" in caplog.text
    assert folder.read_text() == "a file where the folder should be"


def test_from_pretrained(folder, runs, make, tmp_path):
    make().save_pretrained(tmp_path / "model")
    loaded = TurboEsm.from_pretrained(tmp_path / "model", calibration="auto", preset="paper")
    assert loaded.calibration.provenance["sequences"] == 2
    assert loaded.prefill("MKTAYIAKQR").bits_per_element < 8
    TurboEsm.from_pretrained(tmp_path / "model", calibration="auto", preset="paper")
    assert len(runs) == 1


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert auto_calibration.calibration_folder().parts[-2:] == ("esm_turbo", "calibrations")
