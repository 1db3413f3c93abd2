"""Files shipped with the package are found, in a checkout and in a wheel."""

from pathlib import Path

import pytest

from esm_turbo import assets


def test_embedded_model_is_complete():
    names = {path.name for path in assets.EMBEDDED_MODEL.iterdir()}
    assert {"config.json", "model.safetensors", "calibration.safetensors", "vocab.txt"} <= names


@pytest.mark.parametrize(("proteins", "count"), [(assets.calibration_proteins, 640), (assets.evaluation_proteins, 200)])
def test_shipped_proteins(proteins, count):
    assert proteins().read_text(encoding="ascii").count(">") == count


def test_data_inside_the_package_comes_first(monkeypatch, tmp_path):
    """As in a wheel; a checkout has the folder beside the package."""
    inside, beside = tmp_path / "package" / "calibration_data", tmp_path / "calibration_data"
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "package")
    with pytest.raises(FileNotFoundError, match=r"proteins\.fasta is missing"):
        assets.calibration_proteins()
    for folder in (beside, inside):
        folder.mkdir(parents=True)
        (folder / "proteins.fasta").touch()
        assert assets.calibration_proteins() == folder / "proteins.fasta"


def test_shipped_proteins_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert assets.named_proteins(Path("shipped"), assets.calibration_proteins) == assets.calibration_proteins()
    assert assets.named_proteins(Path("mine.fasta"), assets.calibration_proteins) == Path("mine.fasta")
    (tmp_path / "shipped").touch()
    assert assets.named_proteins(Path("shipped"), assets.calibration_proteins) == Path("shipped")
