"""The options that spread a command over devices, or over runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esm_turbo.cli.options import CalibratedModelOptions, ModelOptions, ParallelOptions
from esm_turbo.cli.parallel import Spread, _anywhere
from esm_turbo.cli.sharding import Sharding
from esm_turbo.parallel.shards import ShardError
from tests.helpers.embedding_files import files


def test_which_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(device: str | None = None, **options: object) -> tuple[str, ...] | None:
        return Spread.of(ParallelOptions(**options), ModelOptions(device=device)).names  # type: ignore[arg-type]

    assert names() is None and names("cuda:1") is None
    assert names(workers=2) == names("cpu", workers=2) == ("cpu", "cpu")
    assert names(devices=("cuda:0", "cuda:2")) == ("cuda:0", "cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert names(devices=("all",)) == ("cuda:0", "cuda:1")
    spread = Spread.of(ParallelOptions(devices=("cuda:0", "cuda:0")), ModelOptions())
    assert spread.devices == "cuda:0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--workers", "2", "--devices", "all"], "give one of them"),
        (["--devices", "all"], "--devices all finds no CUDA device here; --workers N uses processes on the CPU"),
        (["--devices", "cpu", "cuda:0"], "--devices cpu cuda:0 load the model in dtypes of their own: give --dtype"),
        (["--workers", "2", "--device", "cuda:1"], "--device cuda:1 is one device; leave it out"),
        (
            ["--device-map", "auto", "--workers", "2"],
            "--device-map spreads one model over devices; leave it out beside",
        ),
        (["--engine", "ray"], "--engine ray needs --workers N, the number of actors"),
        (["--workers", "2", "--address", "auto"], "--address auto is that of a Ray cluster; give --engine ray as well"),
    ],
    ids=["none", "both", "no-gpu", "kinds", "device", "map", "ray", "address"],
)
def test_what_cannot_be_spread(esm, fasta, tmp_path, monkeypatch, options, message) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    before = files(tmp_path)
    for command in (["embed", fasta, tmp_path / "x"], ["store", fasta, tmp_path / "x"], ["score", fasta, fasta]):
        result = esm(*command, *options)
        assert result.code == 2 and message in result.error
    assert files(tmp_path) == before


def test_other_processes_find_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    options = CalibratedModelOptions(model="model", calibration="auto", dtype="float32")
    assert _anywhere(options) == CalibratedModelOptions(
        model=str(tmp_path / "model"), calibration="auto", dtype="float32"
    )
    Path("c.safetensors").touch()
    elsewhere = CalibratedModelOptions(model="facebook/esm2_t6_8M_UR50D", calibration="c.safetensors")
    assert _anywhere(elsewhere).model == "facebook/esm2_t6_8M_UR50D"
    assert _anywhere(elsewhere).calibration == str(tmp_path / "c.safetensors")
    assert _anywhere(ModelOptions()) == ModelOptions()


@pytest.mark.slow
def test_workers_of_a_command(esm, fasta, tmp_path, tiny_folder) -> None:
    model = ["--model", tiny_folder, "--include", "mean", "--threads", "1"]
    one = esm("embed", fasta, tmp_path / "one", *model)
    two = esm("embed", fasta, tmp_path / "two", *model, "--workers", "2")
    assert (one.code, two.code) == (0, 0) and two.said == one.said
    assert two.err == "esm-turbo: 2 workers on cpu\n"
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_an_input_that_changes_while_a_shard_reads_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "targets.fasta"
    path.write_text(">a\nMKTAY\n", encoding="utf-8")
    sharding = Sharding("score", "table", "1/2", tmp_path / "out.csv", [path, None])
    assert not sharding.is_done(dict)
    path.write_text(">a\nMKTAW\n", encoding="utf-8")
    with pytest.raises(ShardError, match=r"targets\.fasta: has changed while it was read; run the shard again"):
        sharding.is_done(dict)
