"""`esm-turbo store`: contexts added, skipped, and refused."""

import errno
import json

import pytest

from esm_turbo import ContextStore
from esm_turbo.files import artifacts
from esm_turbo.modeling_esm_turbo import TurboEsmModel
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


def test_a_store_of_another_model_is_unchanged(esm, fasta, tmp_path, tiny_folder):
    folder = tmp_path / "store"
    assert esm("store", fasta, folder, "--model", tiny_folder, "--preset", "exact").code == 0
    before = files(folder)
    result = esm("store", fasta, folder, "--preset", "exact")
    assert result.code == 2
    assert "holds contexts of" in result.error
    assert files(folder) == before


def test_a_full_disk_is_one_error(esm, fasta, tmp_path, tiny_folder, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "save_file", full)
    result = esm("store", fasta, tmp_path / "store", "--model", tiny_folder, "--preset", "exact")
    assert result.code == 1
    assert result.error.endswith("cannot be written (No space left on device)")


def test_embeddings_are_not_written_into_a_store(esm, fasta, tmp_path, tiny_folder):
    contexts = tmp_path / "contexts"
    assert esm("store", fasta, contexts, "--model", tiny_folder, "--preset", "exact").code == 0
    before = files(contexts)
    result = esm("embed", fasta, contexts, "--model", tiny_folder)
    assert result.code == 2
    assert "is a store of contexts; name another path to write" in result.error
    assert files(contexts) == before


def test_a_store_inside_a_file_is_refused(esm, fasta, tiny_folder):
    result = esm("store", fasta, fasta / "contexts", "--model", tiny_folder)
    assert (result.code, result.out) == (2, "")
    assert f"{fasta}: is a file; a store is a folder" in result.error


def test_a_protein_that_does_not_fit_does_not_stop_the_others(esm, write, tmp_path, tiny_folder, monkeypatch):
    def small(self, input_ids, *arguments, **options):
        if input_ids.numel() > 30:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
        return original(self, input_ids, *arguments, **options)

    original = TurboEsmModel.forward
    monkeypatch.setattr(TurboEsmModel, "forward", small)
    fasta, folder = write("some.fasta", f">a\nMKTAYIAK\n>b\nGSGS\n>c\n{'MK' * 20}\n>d\nMMM\n"), tmp_path / "store"
    result = esm("store", fasta, folder, "--model", tiny_folder, "--preset", "exact")
    assert result.code == 1
    assert "record 'c': its 40 residues need more memory than cpu has; cut it, request less" in result.error
    assert result.out.startswith(f"3 contexts computed; {folder} holds 3, ")
