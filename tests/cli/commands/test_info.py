"""`esm-turbo info`: models, artifacts, embeddings, the environment, and sizes of caches that are not stored."""

import json

import pytest
import torch

from esm_turbo import Calibration, TurboEsm
from esm_turbo.cli.info import cache_sizes, file_info, model_info, stored_bytes
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, Geometry
from esm_turbo.files.artifacts import ArtifactError
from tests.helpers.command_inputs import altered, other_kind, other_version, truncated


def test_info_of_a_model(esm, tiny_folder, tiny_calibration, tiny):
    result = esm("info", tiny_folder, "--length", "11", "--batch", "3", "--json=-")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["geometry"] == {"num_layers": 2, "num_heads": 4, "head_dim": 16}
    assert found["model"] == "tiny"
    assert not found["calibrated"]
    sizes = found["cache"]["presets"]
    assert sizes["fp32"]["bytes"] == 3 * 11 * 2 * 2 * 4 * 16 * 4
    assert sizes["exact"]["bytes"] == 3 * tiny.prefill("MKTAYIAKQR").nbytes
    calibrated = esm("info", tiny_folder, "--calibration", tiny_calibration(seed=0), "--length", "11", "--json", "-")
    found = json.loads(calibrated.out)
    assert found["calibrated"]
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0))
    for preset, size in found["cache"]["presets"].items():
        if not preset.startswith("fp"):
            turbo.model.set_turbo(calibration=turbo.calibration, preset=preset)
            # The prediction without a calibration was the same.
            assert size["bytes"] == turbo.prefill("MKTAYIAKQR").nbytes == sizes[preset]["bytes"] / 3
    assert "geometry" in esm("info", tiny_folder).out


def test_info_of_artifacts(esm, tmp_path, tiny_calibration, tiny):
    calibration = json.loads(esm("info", tiny_calibration(seed=0), "--json", "-").out)
    assert calibration["kind"] == "calibration"
    assert calibration["provenance"]["residues"] == 100
    cache = tiny.prefill(["MKTAYIAKQR", "MKT"])
    cache.save(tmp_path / "cache.safetensors")
    found = json.loads(esm("info", tmp_path / "cache.safetensors", "--json", "-").out)
    assert (found["kind"], found["lengths"], found["bytes"]) == ("cache", [11, 4], cache.nbytes)
    assert found["preset"] == "exact"
    for path in (tiny_calibration(seed=0), tmp_path / "cache.safetensors"):
        result = esm("info", path)
        assert (result.code, result.err) == (0, "")
        assert "2 layers x 4 heads x 16" in result.out


@pytest.mark.parametrize("damage", [truncated, altered, other_version])
def test_info_refuses_a_damaged_cache(esm, tmp_path, tiny, damage):
    path = tmp_path / "cache.safetensors"
    tiny.prefill("MKTAYIAKQR" * 5).save(path)
    damage(path)
    result = esm("info", path)
    assert result.code == 2
    assert str(path) in result.error


def test_info_of_the_environment(esm):
    result = esm("info", "--json", "-")
    found = json.loads(result.out)
    assert found["environment"]["torch"] == torch.__version__
    assert found["model"] == "esm2-mini"
    assert "transformers" in esm("info").out


@pytest.fixture
def written(esm, tmp_path, tiny_folder, tiny_calibration):
    """A folder with everything that commands write, with caches in it."""
    fasta = tmp_path / "in.fasta"
    fasta.write_text(">a\nMKTAYIAKQRQISF\n>again\nMKTAYIAKQRQISF\n>b\nGSGSG\n")
    out = tmp_path / "written"
    model = ["--model", tiny_folder, "--calibration", tiny_calibration(seed=0)]
    for arguments in (
        ["calibrate", fasta, "--out", out / "c.safetensors", *model[:2]],
        ["embed", fasta, out / "pt", "--include", "mean", "per_tok", "cache", *model],
        ["embed", fasta, out / "tensors", "--format", "safetensors", "--include", "mean", "cache", *model],
        ["embed", fasta, out / "e.h5", "--include", "mean", *model],
        ["store", fasta, out / "store", *model],
        ["variants", fasta, "--out", out / "v.parquet", *model],
    ):  # fmt: skip
        out.mkdir(exist_ok=True)
        assert esm(*arguments).code == 0, arguments
    return out


def test_artifacts_are_described(esm, written):
    kinds = {}
    paths = [written / "pt", written / "tensors", written / "store", *sorted(written.rglob("*"))]
    for path in paths:
        # Locks and counts of look-ups are the store's own.
        if (path.is_dir() and path not in paths[:3]) or path.name.startswith(".") or path.suffix in (".lock", ".log"):
            continue
        result = esm("info", path)
        assert (result.code, result.err) == (0, ""), path
        kinds[path.relative_to(written).as_posix()] = json.loads(esm("info", path, "--json", "-").out)["kind"]
    assert kinds["pt"] == kinds["e.h5"] == kinds["pt/index.tsv"] == kinds["pt/settings.json"] == "embeddings"
    assert kinds["store"] == kinds["store/store.safetensors"] == "context_store"
    assert set(kinds.values()) == {
        "calibration", "cache", "context", "context_shelf", "context_store", "embedding", "embeddings", "table",
    }  # fmt: skip


def test_info_of_embeddings_with_caches_and_in_hdf5(esm, written):
    found = json.loads(esm("info", written / "pt", "--json", "-").out)
    assert (found["proteins"], found["format"], found["cache_options"]["codec"]) == (3, "pt", "turbo")
    assert (found["model"], found["include"]) == ("tiny", ["cache", "mean", "per_tok"])
    assert "proteins" in esm("info", written / "pt").out
    found = json.loads(esm("info", written / "e.h5", "--json", "-").out)
    assert (found["proteins"], found["format"], found["model"], found["device"]) == (3, "h5", "tiny", "cpu")
    [file] = [path for path in (written / "pt").glob("*.pt") if torch.load(path)["label"] == "b"]
    found = json.loads(esm("info", file, "--json", "-").out)
    assert found["label"] == "b"
    assert found["tensors"] == {"representations.2": [5, 64], "mean_representations.2": [64]}
    (written / "pt" / "settings.json").write_text("[1, 2]")
    result = esm("info", written / "pt")
    assert result.code == 2 and "damaged" in result.error


@pytest.mark.parametrize("name", ["e.h5", "x.pt"])
def test_other_files_in_known_formats_are_refused(esm, tmp_path, name):
    import h5py

    path = tmp_path / name
    if name == "e.h5":
        with h5py.File(path, "w") as file:
            file["x"] = [1]
    else:
        torch.save({"x": torch.zeros(1)}, path)
    result = esm("info", path)
    assert result.code == 2
    assert str(path) in result.error
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "damaged" in esm("info", path).error


def test_info_of_what_it_cannot_describe(esm, tmp_path):
    (tmp_path / "scores.csv.shards").mkdir()
    (tmp_path / "README.md").write_text("# Scores\n")
    (tmp_path / "scores.csv").write_text("id,score\na,1\n")
    messages = {
        "scores.csv.shards": f"is a folder of shards; esm-turbo status {tmp_path / 'scores.csv'} tells what is done",
        "README.md": "is not a file of esm_turbo, or a damaged one",
        "scores.csv": "is not a file of esm_turbo, or a damaged one",
    }
    for name, message in messages.items():
        assert esm("info", tmp_path / name).error == f"{tmp_path / name}: {message}"


GEOMETRY = Geometry(num_layers=2, num_heads=4, head_dim=16)


def test_bytes_of_long_proteins_are_extrapolated(tiny_folder, tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=calibration)
    for preset in PRESETS:
        turbo.model.set_turbo(calibration=calibration, preset=preset)
        for length in (127, 128, 191, 501):
            assert stored_bytes(calibration.codec(preset), length) == turbo.prefill("M" * (length - 1)).nbytes


def test_sizes_without_a_calibration_equal_those_with_one(tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    found = cache_sizes(GEOMETRY, None, 200, 3)
    assert found == cache_sizes(GEOMETRY, calibration, 200, 3)
    assert (found["tokens"], found["batch_size"]) == (200, 3)
    assert list(found["presets"]) == ["fp32", "fp16", *PRODUCT_PRESETS]
    assert found["presets"]["fp16"] == {"bytes": 2 * 3 * 200 * 256, "bits_per_element": 16.0, "ratio_to_fp32": 2.0}


@pytest.mark.parametrize(("length", "batch_size"), [(0, 1), (1, 0)])
def test_sizes_of_nothing_are_refused(length, batch_size):
    with pytest.raises(ValueError, match=f"at least 1, got {length} and {batch_size}"):
        cache_sizes(GEOMETRY, None, length, batch_size)


def test_the_calibration_in_a_models_folder_is_found(tiny_folder, tiny_calibration, tmp_path):
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0))
    turbo.save_pretrained(tmp_path / "calibrated")
    assert model_info(tmp_path / "calibrated")["calibrated"]
    assert not model_info(tiny_folder)["calibrated"]
    assert model_info(tiny_folder, tiny_calibration(seed=0))["calibrated"]
    with pytest.raises(ValueError, match="give this model's own"):
        model_info(tiny_folder, tiny_calibration(seed=0, layers=3))


def test_files_of_other_programs_are_refused(tmp_path):
    other_kind(tmp_path / "x")
    with pytest.raises(ArtifactError, match="is not a calibration, cache or embedding of esm_turbo"):
        file_info(tmp_path / "x")
