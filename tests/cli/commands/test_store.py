"""`esm-turbo store`: contexts added, skipped, and refused."""

import json

import pytest

from esm_turbo import ContextStore
from esm_turbo.model.executor import Executor
from tests.helpers.command_inputs import files


def test_store(esm, write, tmp_path, tiny_folder, tiny):
    fasta, folder = write("some.fasta", ">a\nMKTAYIAK\n>b\nGSGS\n>c\nMK-T\n>d\nmktayiak\n"), tmp_path / "store"
    command = ["store", fasta, folder, "--model", tiny_folder, "--preset", "exact"]
    result = esm(*command)
    assert result.code == 1
    assert "record 'c': position 3 is '-'" in result.error
    assert result.out.startswith(f"2 contexts computed; {folder} holds 2, ")
    # The same command computes nothing again.
    again = esm(*command, "--json", "-")
    assert again.code == 1
    summary = json.loads(again.out)
    assert (summary["computed"], summary["contexts"]) == (0, 2)
    assert [failed["record"] for failed in summary["failed"]] == ["c"]
    with ContextStore(folder) as store:
        store.get_or_prefill(tiny, ["MKTAYIAK", "GSGS", "MMM"])
    shown = esm("info", folder)
    assert shown.code == 0
    for text in ("store of contexts", "tiny", "66.7 %", "exact"):
        assert text in shown.out
    info = json.loads(esm("info", folder, "--json", "-").out)
    assert info["contexts"] == 3 and info["usage"]["hit_rates"]["disk"] == pytest.approx(2 / 3)
    assert "memory" not in info


def test_a_store_inside_a_file_is_refused(esm, fasta, tiny_folder):
    result = esm("store", fasta, fasta / "contexts", "--model", tiny_folder)
    assert (result.code, result.out) == (2, "")
    assert f"{fasta}: is a file; a store is a folder" in result.error


def test_a_protein_that_does_not_fit_does_not_stop_the_others(esm, write, tmp_path, tiny_folder, monkeypatch):
    def small(self, inputs, cache):
        if inputs.ids.numel() > 30:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
        return original(self, inputs, cache)

    original = Executor.forward
    monkeypatch.setattr(Executor, "forward", small)
    fasta, folder = write("some.fasta", f">a\nMKTAYIAK\n>b\nGSGS\n>c\n{'MK' * 20}\n>d\nMMM\n"), tmp_path / "store"
    result = esm("store", fasta, folder, "--model", tiny_folder, "--preset", "exact")
    assert result.code == 1
    assert "record 'c': its 40 residues need more memory than cpu has; cut it, request less" in result.error
    assert result.out.startswith(f"3 contexts computed; {folder} holds 3, ")


@pytest.fixture
def computed(monkeypatch):
    """Numbers of tokens of the rows that the model computes from scratch, forward by forward."""
    calls = []
    original = Executor.forward

    def noting(self, inputs, cache):
        if inputs.use_cache and not cache.get_seq_length():
            calls.append(inputs.ids.shape[1])
        return original(self, inputs, cache)

    monkeypatch.setattr(Executor, "forward", noting)
    return calls


@pytest.mark.parametrize(
    ("command", "contexts"),
    [
        (["score", "targets.fasta", "candidates.fasta", "--arm", "frozen", "full"], 2 * 2),
        (["score", "targets.fasta", "candidates.fasta", "--arm", "frozen", "turbo", "--place", "empty"], 2),
        (["variants", "targets.fasta", "--arm", "frozen"], 2),
        (["generate", "targets.fasta", "--max-new-tokens", "3", "--seed", "1"], 2),
        (["embed", "targets.fasta", "out", "--include", "cache", "mean", "--format", "safetensors"], 2),
    ],
    ids=["score", "score-empty", "variants", "generate", "embed"],
)
def test_commands_use_and_fill_a_store(esm, write, tmp_path, tiny_folder, computed, monkeypatch, command, contexts):
    write("targets.fasta", ">a\nMKTAYIAKQRQ\n>b\nGSWKDLAE\n")
    write("candidates.fasta", ">x\nACD\n>y\nWTCK\n>z\nGGG\n")
    monkeypatch.chdir(tmp_path)
    model = ["--model", tiny_folder, "--preset", "exact"]
    plain = esm(*command, *model, "--json", "plain.json")
    computed.clear()
    first = esm(*[f"{word}1" if word == "out" else word for word in command], *model, "--store", "contexts")
    assert (plain.code, first.code) == (0, 0)
    looked_up = contexts * (2 if "turbo" in command else 1)
    assert first.err == f"esm-turbo: contexts: {looked_up - contexts} contexts found, {contexts} computed and added\n"
    assert computed
    computed.clear()
    again = esm(*[f"{word}2" if word == "out" else word for word in command], *model, "--store", "contexts")
    assert again.err == f"esm-turbo: contexts: {looked_up} contexts found, 0 computed and added\n"
    assert computed == []
    if command[0] != "embed":
        assert plain.out == first.out == again.out


def test_stored_contexts_are_those_that_generation_and_embedding_use(esm, fasta, tmp_path, tiny_folder, computed):
    model = ["--model", tiny_folder, "--preset", "exact", "--store", tmp_path / "contexts"]
    assert esm("store", fasta, tmp_path / "contexts", *model[:4]).code == 0
    computed.clear()
    assert esm("generate", fasta, "--max-new-tokens", "2", *model).code == 0
    assert esm("embed", fasta, tmp_path / "out", "--include", "cache", *model).code == 0
    assert computed == []


@pytest.mark.parametrize("command", [["variants"], ["generate", "--max-new-tokens", "2"]])
def test_a_store_of_another_model_is_refused(esm, fasta, tmp_path, tiny_folder, command):
    store = tmp_path / "contexts"
    assert esm("store", fasta, store, "--model", tiny_folder, "--preset", "exact").code == 0
    before = files(store)
    result = esm(command[0], fasta, *command[1:], "--store", store)
    assert result.code == 2 and "holds contexts of" in result.error
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    result = esm(command[0], fasta, *command[1:], "--store", tmp_path / "folder")
    assert result.code == 2 and "not a context store, but holds x" in result.error
    assert files(store) == before
