"""`esm-turbo embed`: files in every format, bad records, and runs that join or fail."""

import json

import pytest
import torch

from esm_turbo import TurboEsm, TurboKVCache
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import read_embedding, sequence_hash
from tests.helpers.command_inputs import ONE_RECORD, SEQUENCES, files, index_of
from tests.helpers.embedding_files import read_embeddings


def assert_same(tensor, expected):
    torch.testing.assert_close(torch.as_tensor(tensor), expected, rtol=1e-5, atol=1e-5)


def test_embed_pt(esm, fasta, tmp_path, tiny_folder, tiny):
    out = tmp_path / "out"
    result = esm(
        "embed", fasta, out, "--model", tiny_folder, "--repr_layers", "-1", "0",
        "--include", "mean", "per_tok", "bos", "contacts", "--toks_per_batch", "64",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    assert "3 of 3 proteins embedded" in result.out
    index = index_of(out)
    expected = tiny.embed(list(SEQUENCES.values()), (2, 0), ("mean", "per_tok", "bos", "contacts"))
    for (name, sequence), embedding in zip(SEQUENCES.items(), expected, strict=True):
        safe = name if "/" not in name else sequence_hash(sequence)
        assert index[name] == [str(len(sequence)), f"{safe}.pt", ""]
        saved = torch.load(out / index[name][1], weights_only=True)
        assert list(saved) == [
            "label", "key", "representations", "mean_representations", "bos_representations", "contacts",
        ]  # fmt: skip
        assert saved["label"] == name
        for layer in (0, 2):
            assert_same(saved["representations"][layer], embedding.representations[layer])
            assert_same(saved["mean_representations"][layer], embedding.mean_representations[layer])
            assert_same(saved["bos_representations"][layer], embedding.bos_representations[layer])
        assert_same(saved["contacts"], embedding.contacts)
    # No other files: identifiers that are no safe names are not used as paths, and no temporary file is left.
    assert len(files(tmp_path)) == 1 + 3 + 2


def test_embed_safetensors_and_caches(esm, fasta, tmp_path, tiny_folder, tiny, tiny_calibration):
    out = tmp_path / "out"
    result = esm(
        "embed", fasta, out, "--model", tiny_folder, "--format", "safetensors", "--include", "mean", "cache",
        "--calibration", tiny_calibration(seed=0), "--preset", "paper",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    turbo = TurboEsm.from_pretrained(tiny_folder, calibration=tiny_calibration(seed=0), preset="paper")
    for name, (_, embedding_file, cache_file) in index_of(out).items():
        metadata, tensors = read_embedding(out / embedding_file)
        assert len(metadata.pop("key")) == 64
        assert metadata == {"label": name, "residues": len(SEQUENCES[name])}
        assert list(tensors) == ["mean_representations.2"]
        assert_same(tensors["mean_representations.2"], tiny.embed(SEQUENCES[name])[0].mean_representations[2])
        cache = TurboKVCache.load(out / cache_file, model=turbo.model)
        assert cache.config.name == "paper"
        assert cache.nbytes == turbo.prefill(SEQUENCES[name]).nbytes


@pytest.mark.parametrize(("name", "options"), [("e.h5", []), ("e.parquet", ["--include", "mean"]), ("e.parquet", [])])
def test_one_file_in_a_new_folder(esm, fasta, tmp_path, tiny_folder, tiny, name, options):
    """A table holds means unless told otherwise."""
    out = tmp_path / "new" / name
    result = esm("embed", fasta, out, "--model", tiny_folder, *options)
    assert (result.code, result.err) == (0, "")
    records = [ProteinRecord(one, sequence) for one, sequence in SEQUENCES.items()]
    for record, arrays in zip(records, read_embeddings(out, records), strict=True):
        [expected] = tiny.embed(record.sequence, include=["mean"] if "parquet" in name else ["mean", "per_tok"])
        assert arrays.keys() == expected.tensors().keys()
        for key, tensor in expected.tensors().items():
            assert_same(arrays[key], tensor)
    assert list(out.parent.iterdir()) == [out]


def test_letters_and_gaps_are_replaced_on_request(esm, tmp_path, tiny_folder):
    path = tmp_path / "aligned.fasta"
    path.write_text(">d\nMKTAYI--JR\n")
    arguments = ["embed", path, tmp_path / "out", "--model", tiny_folder, "--include", "mean"]
    for options, message in (
        ([], "position 7 is '-'"),
        (["--unknown", "X"], "--remove-gaps"),
        (["--remove-gaps"], "position 9 is 'J'"),
        (["--unknown", "B", "--remove-gaps"], "--unknown"),
    ):
        result = esm(*arguments, *options)
        assert result.code == 2 and message in result.err
    assert esm(*arguments, "--remove-gaps", "--unknown", "x").code == 0
    assert index_of(tmp_path / "out") == {"d": ["8", "d.pt", ""]}


@pytest.mark.parametrize("case", ONE_RECORD)
def test_good_records_are_embedded_and_bad_ones_reported(esm, tmp_path, tiny_folder, case):
    text, message = ONE_RECORD[case]
    path, out = tmp_path / "some.fasta", tmp_path / "out"
    path.write_text(text)
    result = esm("embed", path, out, "--model", tiny_folder, "--include", "mean", "--json", "-")
    assert result.code == 1
    assert message in result.error
    assert set(index_of(out)) == set(SEQUENCES)
    summary = json.loads(result.out)
    assert summary["written"] == 3
    assert len(summary["failed"]) == 1


def test_truncation_and_long_proteins_warn_once(esm, tmp_path, tiny_folder):
    path = tmp_path / "long.fasta"
    path.write_text(">a\n" + "MKTAYIAKQR" * 103 + "\n>b\n" + "GSGSWKDLAE" * 104 + "\n>c\nMKT\n")
    arguments = ["embed", path, "--model", tiny_folder, "--include", "per_tok"]
    result = esm(*arguments[:2], tmp_path / "whole", *arguments[2:])
    assert result.code == 0
    [line] = result.err.splitlines()
    assert line.startswith("esm-turbo: warning: 2 proteins of up to 1040 residues")
    result = esm(*arguments[:2], tmp_path / "cut", *arguments[2:], "--truncation_seq_length", "50", "--json", "-")
    assert result.code == 0
    assert result.err == "esm-turbo: warning: 2 proteins truncated to 50 residues\n"
    assert json.loads(result.out)["truncated"] == ["a", "b"]
    lengths = {
        name: len(torch.load(tmp_path / "cut" / file, weights_only=True)["representations"][2])
        for name, (_, file, _) in index_of(tmp_path / "cut").items()
    }
    assert lengths == {"a": 50, "b": 50, "c": 3}


def test_a_second_file_is_added_with_the_same_settings_only(esm, fasta, tmp_path, tiny_folder):
    more = tmp_path / "more.fasta"
    more.write_text(">d\nMMMMKKKK\n>c\nACDEFGHIKL\n")
    out = tmp_path / "out"
    assert esm("embed", fasta, out, "--model", tiny_folder, "--include", "mean").code == 0
    assert esm("embed", more, out, "--model", tiny_folder, "--include", "mean").code == 0
    index = index_of(out)
    assert set(index) == {*SEQUENCES, "d"}
    # The identifier names another protein now.
    assert index["c"][:2] == ["10", "c.pt"]
    before = files(out)
    result = esm("embed", more, out, "--model", tiny_folder, "--include", "mean", "--dtype", "bfloat16")
    assert result.code == 2 and "holds embeddings made with" in result.error
    assert files(out) == before


def test_a_protein_whose_sequence_changed_is_embedded_again(esm, tmp_path, tiny_folder):
    for residues, warning in (
        ("MKTAY", ""),
        ("GSGS", "a.pt: was damaged, or of another sequence, and has been replaced"),
    ):
        path = tmp_path / "changed.fasta"
        path.write_text(f">a\n{residues}\n")
        result = esm("embed", path, tmp_path / "out", "--model", tiny_folder, "--include", "mean")
        assert result.code == 0 and warning in result.err and bool(warning) == bool(result.err)
    assert index_of(tmp_path / "out") == {"a": ["4", "a.pt", ""]}


def test_embed_in_windows(esm, write, tmp_path, tiny_folder, tiny):
    sequences = {"long": "MKTAYIAKQRQISFVKSHFSRQ" * 5, "short": "MKTAYIAK"}
    fasta = write("in.fasta", "".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    out, model = tmp_path / "out", ["--model", tiny_folder, "--preset", "exact"]
    options = ["--window", 40, "--overlap", 8, "--memory", 20, "--format", "safetensors", *model]
    assert esm("embed", fasta, out, *options).code == 0
    expected = tiny.embed(list(sequences.values()), window=40, overlap=8, memory=20)
    for name, embedding in zip(sequences, expected, strict=True):
        _, tensors = read_embedding(out / f"{name}.safetensors")
        torch.testing.assert_close(tensors, embedding.tensors(), rtol=1e-4, atol=1e-5)
    # It continues with the same windows only.
    assert "2 of 2 proteins embedded" in esm("embed", fasta, out, *options).out
    assert "holds embeddings made with" in esm("embed", fasta, out, *options[2:], "--window", 41).error
    assert "--overlap must be smaller" in esm("embed", fasta, out, "--window", 4, "--overlap", 4, *model).error
    assert "no contacts" in esm("embed", fasta, tmp_path / "x", "--include", "contacts", "--window", 4, *model).error


def test_options_of_esm_extract(esm, fasta, tmp_path, tiny_folder):
    out = tmp_path / "out"
    arguments = ["embed", fasta, out, "--model", tiny_folder, "--include", "mean", "--nogpu"]
    assert esm(*arguments).code == 0
    assert {path.name for path in out.glob("*.pt")} == {
        "b.pt", "c.pt", f"{sequence_hash(SEQUENCES['sp|P1/../x'])}.pt"
    }  # fmt: skip
    result = esm(*arguments, "--device", "cuda")
    assert (result.code, result.error) == (2, "--nogpu is --device cpu, but there is --device cuda; give one of them")
    result = esm("embed", "esm2_t6_8M_UR50D", fasta, out)
    assert result.code == 2
    assert "the model, esm-extract's first argument, is --model here" in result.error
