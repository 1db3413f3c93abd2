"""`esm-turbo calibrate`: calibrations made, refused, and interrupted."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esm_turbo import Calibration, TurboEsm
from esm_turbo.assets import evaluation_proteins
from esm_turbo.cli.parallel import Spread
from esm_turbo.files.quality import Figures, Quality
from esm_turbo.proteins.fasta import read_fasta_strict, sha256_file
from tests.helpers.command_inputs import SEQUENCES

ROOT = Path(__file__).resolve().parents[3]


def test_a_calibration_is_made_and_measured(esm, fasta, tmp_path, tiny_folder):
    out, summary = tmp_path / "new" / "c.safetensors", tmp_path / "summary.json"
    result = esm("calibrate", fasta, "--model", tiny_folder, "--out", out, "--toks_per_batch", "50", "--json", summary)
    assert result.code == 0
    assert not result.err
    assert "alpha_beta" in result.out
    assert "1-100" in result.out
    assert str(out) in result.out.replace("\n", "")
    record = Calibration.load(out).provenance
    assert record["model"] == "tiny"
    assert record["classes"] == {"alpha_beta": {"sequences": 3, "residues": sum(map(len, SEQUENCES.values()))}}
    assert record["fasta"] == {"name": "good.fasta", "sha256": sha256_file(fasta)}
    assert json.loads(summary.read_text())["provenance"] == record
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=out)
    assert turbo.prefill("MKTAY").bits_per_element < 16
    quality = Calibration.load(out).quality
    assert quality is not None
    assert json.loads(summary.read_text())["quality"] == quality.to_dict()
    assert json.loads(esm("info", out, "--json", "-").out)["quality"] == quality.to_dict()
    shown = " ".join(esm("info", out).out.split())
    assert "outside of the calibration" in shown and quality.residues >= 800
    for figures in (*quality.presets.values(), *quality.freezing.values()):
        assert f"{figures.cosine_mean:.5f}" in shown


def test_what_eight_bits_cost_is_measured(esm, fasta, tmp_path, tiny_folder):
    out = tmp_path / "c.safetensors"
    result = esm("calibrate", fasta, "--model", tiny_folder, "--out", out, "--precision", "fp8")
    assert result.code == 0
    assert "precision fp8: whole forwards against the model in bfloat16" in result.out
    quality = Calibration.load(out).quality
    assert quality.dtype == "bfloat16" and quality.eight_bits.every.kl_mean > 0
    assert "precision fp8: whole forwards" in esm("info", out).out
    refused = esm("calibrate", fasta, "--model", tiny_folder, "--out", out, "--precision", "fp8", "--dtype", "float32")
    assert refused.code == 2 and "needs a model in bfloat16, got torch.float32" in refused.error


@pytest.mark.slow
def test_workers_make_the_calibration_of_one_process(esm, fasta, tmp_path, tiny_folder):
    options = ["calibrate", fasta, "--model", tiny_folder, "--toks_per_batch", "50", "--threads", "1"]
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert esm(*options, "--out", one).code == 0
    result = esm(*options, "--out", two, "--workers", "2")
    # On a slow machine, lines of progress follow.
    assert result.code == 0 and result.err.splitlines()[0] == "esm-turbo: 2 workers on cpu"
    first, second = load_file(one), load_file(two)
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert Calibration.load(one).provenance == Calibration.load(two).provenance


def test_shards_of_a_calibration_are_refused(esm, fasta, tmp_path, tiny_folder):
    result = esm("calibrate", fasta, "--model", tiny_folder, "--out", tmp_path / "c.safetensors", "--shard", "1/2")
    assert result.code == 2 and "which shards cannot share: leave --shard out, or give --workers" in result.error
    assert "--shard" not in esm("calibrate", "--help").out
    assert not list(tmp_path.glob("c.safetensors*"))


def test_every_tenth_protein_of_a_users_file_is_measured(esm, tmp_path, tiny_folder):
    path, out = tmp_path / "ten.fasta", tmp_path / "c.safetensors"
    sequences = ["MKTAYIAKQRQISFVKSHFS"[i:] * 5 for i in range(10)]
    path.write_text("".join(f">p{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    assert esm("calibrate", path, "--model", tiny_folder, "--out", out).code == 0
    calibration = Calibration.load(out)
    assert calibration.provenance["sequences"] == 9 and calibration.quality is not None
    first = [sequences[9]]
    for record in read_fasta_strict(evaluation_proteins()):
        if len(first) == calibration.quality.proteins:
            break
        first.append(record.sequence)
    assert calibration.quality.sequences_sha256 == hashlib.sha256("\n".join(first).encode()).hexdigest()


def test_a_file_that_changes_is_not_calibrated_on(esm, fasta, tmp_path, tiny_folder, monkeypatch):
    """Its checksum would be of other proteins."""
    load = Spread.load

    def change(spread):
        fasta.write_text(">other\nMKTAYIAK\n")
        return load(spread)

    monkeypatch.setattr(Spread, "load", change)
    refused = esm("calibrate", fasta, "--model", tiny_folder, "--out", tmp_path / "c.safetensors")
    assert refused.code == 2 and f"{fasta}: has changed since it was read; run it again" in refused.error


def test_a_preset_that_falls_short_is_warned_of_when_it_is_loaded(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    calibration = Calibration.load(tiny_calibration(seed=0))
    bad = Figures(cosine_mean=0.7, cosine_q01=0.2, kl_mean=0.5, kl_q99=3.0, top1_agreement=0.5)
    calibration.quality = Quality(3, 500, "0" * 64, "float32", "cpu", {"turbo3": bad}, 8, {})
    path = tmp_path / "bad.safetensors"
    calibration.save(path)
    assert re.search(r"turbo3 .* no │", esm("info", path).out)
    model = ["--model", tiny_folder, "--calibration", path]
    result = esm("score", fasta, fasta, *model)
    assert result.code == 0
    assert result.err.count("warning: preset 'turbo3' is inaccurate on this model: mean cosine 0.7") == 1
    assert "inaccurate" not in esm("score", fasta, fasta, *model, "--preset", "turbo4").err


def test_calibrate_replaces_a_calibration_of_another_model(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    folder = shutil.copytree(tiny_folder, tmp_path / "tuned")
    shutil.copy(tiny_calibration(seed=1), folder / "calibration.safetensors")
    out = folder / "calibration.safetensors"
    assert "the weights are not this model's" in esm("evaluate", fasta, "--model", folder).error
    assert esm("calibrate", fasta, "--model", folder, "--out", out).code == 0
    assert TurboEsm.from_pretrained(folder).prefill("MKTAY").batch_size == 1


def test_calibrate_refuses_too_few_residues(esm, tmp_path, tiny_folder):
    path = tmp_path / "few.fasta"
    path.write_text(">a\nMKT\n")
    result = esm("calibrate", path, "--model", tiny_folder, "--out", tmp_path / "c")
    assert result.code == 2
    assert "fewer than a head has components (16)" in result.error
    assert not (tmp_path / "c").exists()


def test_an_interrupted_calibration_leaves_the_old_file_or_none(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    """Killed over an old file, killed without one, and interrupted by Ctrl-C."""
    outs = [tmp_path / name / "c.safetensors" for name in ("old", "new", "interrupted")]
    outs[0].parent.mkdir()
    shutil.copy(tiny_calibration(seed=0), outs[0])
    before = outs[0].read_bytes()
    jobs = [
        {"signal": number, "arguments": ["calibrate", str(fasta), "--model", str(tiny_folder), "--out", str(out)]}
        for number, out in zip((signal.SIGKILL, signal.SIGKILL, signal.SIGINT), outs, strict=True)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.helpers.interrupted_commands", tmp_path / "jobs.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout.split() == [str(-signal.SIGKILL), str(-signal.SIGKILL), "130"]
    assert done.stderr.splitlines()[-1] == "esm-turbo: interrupted"
    assert outs[0].read_bytes() == before
    assert not outs[1].exists()
    assert list(outs[2].parent.iterdir()) == []
    # The half-written files are not in the way.
    for out in outs[:2]:
        assert len(list(out.parent.glob(".*.tmp"))) == 1
        assert esm("calibrate", fasta, "--model", tiny_folder, "--out", out).code == 0
        assert Calibration.load(out).provenance["model"] == "tiny"


def test_the_shipped_proteins_are_found_by_name(esm, tmp_path, tiny_folder, monkeypatch):
    # Not from the checkout's folder.
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "c.safetensors"
    assert esm("calibrate", "shipped", "--model", tiny_folder, "--out", out, "--max-residues", "500").code == 0
    assert Calibration.load(out).provenance["fasta"]["name"] == "proteins.fasta"
