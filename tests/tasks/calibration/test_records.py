"""Calibration from records: counts, provenance, and independence of order and batches."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from esm_turbo import TurboEsm
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict, sha256_file
from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.calibration import records as calibration_records
from esm_turbo.tasks.calibration.records import calibrate_records, first_records, hold_out

RECORDS = [
    ProteinRecord("a", "MKTAYIAKQRQISFVKSHFS" * 4, "class=mainly_alpha"),
    ProteinRecord("b", "GSGSWKDLAEXPLLKRRVWT" * 8, "3.40.50.720 domain"),
    ProteinRecord("c", "ACDEFGHIKLMNPQRSTVWY" * 2),
]


@pytest.fixture
def tiny(turbo, tiny_esm):
    from esm_turbo import TurboEsmForMaskedLM

    return TurboEsm(TurboEsmForMaskedLM.from_esm(tiny_esm(), preset="exact"), turbo.tokenizer)


def test_provenance(tiny, tmp_path):
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text("".join(f">{r.id} {r.description}\n{r.sequence}\n" for r in RECORDS))
    record = calibrate_records(tiny, read_fasta_strict(fasta), source=fasta).provenance
    assert record["sequences"] == 3
    assert record["residues"] == 80 + 160 + 40
    assert record["classes"] == {
        "mainly_alpha": {"sequences": 1, "residues": 80},
        "alpha_beta": {"sequences": 1, "residues": 160},
        "unknown": {"sequences": 1, "residues": 40},
    }
    assert record["lengths"] == {
        "1-100": {"sequences": 2, "residues": 120},
        "101-200": {"sequences": 1, "residues": 160},
    }
    assert record["fasta"] == {"name": "proteins.fasta", "sha256": sha256_file(fasta)}
    assert record["versions"]["torch"] == torch.__version__
    assert list(record["classes"]) == ["mainly_alpha", "alpha_beta", "unknown"]
    # A shared file must not reveal local paths.
    assert str(tmp_path) not in json.dumps(record)


def test_the_result_does_not_depend_on_order_or_batches(tiny):
    one = calibrate_records(tiny, RECORDS, toks_per_batch=1)
    other = calibrate_records(tiny, RECORDS[::-1], toks_per_batch=100_000)
    for kind in ("keys", "values"):
        a, b = (getattr(calibration.statistics.residues, kind) for calibration in (one, other))
        assert a.count == b.count == 280
        np.testing.assert_allclose(a.mean, b.mean, atol=1e-5)
        np.testing.assert_allclose(a.covariance, b.covariance, atol=1e-5)
    np.testing.assert_array_equal(one.statistics.sample.is_special, other.statistics.sample.is_special)
    # Values are rounded to bfloat16, so the last bit may differ.
    np.testing.assert_allclose(one.statistics.sample.keys, other.statistics.sample.keys, rtol=2**-7, atol=1e-5)


def test_progress_ends_at_the_total(tiny):
    seen = []
    calibrate_records(tiny, RECORDS, toks_per_batch=100, progress=lambda *call: seen.append(call))
    assert seen == [("calibrate", done, 280) for done in (0, 160, 240, 280)]


def test_a_model_that_changes_meanwhile_gets_no_calibration(tiny):
    def change(stage, done, total):
        tiny.model.esm.encoder.layer[0].attention.self.key.weight.data[0, 0] += 1

    with pytest.raises(ValueError, match=r"the model has changed since the run began.*the weights differ"):
        calibrate_records(tiny, RECORDS, toks_per_batch=100, progress=change)


class Backwards:
    """Runs pieces from the last to the first, each on a model of its own, as sent to another process."""

    shares_files = False
    devices = None

    def __init__(self, turbo, fails=False):
        self.turbo, self.fails = pickle.dumps(turbo), fails

    def run(self, work, pieces, *, stage, units, progress=None):
        work = pickle.loads(pickle.dumps(work))
        for number in reversed(range(len(pieces))):
            [result] = work.run(pickle.loads(self.turbo), [pieces[number]], lambda *_: None)
            if self.fails:
                result = work.failed(pieces[number], "its process died 3 times")
                assert work.has_failed(result)
            yield number, pickle.loads(pickle.dumps(result))


def test_whoever_computes_a_piece_the_bits_are_the_same(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_records, "_BATCHES_PER_PIECE", 2)
    records = [ProteinRecord(f"p{n}", RECORDS[n % 3].sequence[n:]) for n in range(9)]
    for name, runner in (("one", None), ("other", Backwards(tiny))):
        calibration = calibrate_records(tiny, records, toks_per_batch=150, runner=runner)
        assert calibration.provenance["sequences"] == 9
        assert calibration.provenance["residues"] == sum(len(record.sequence) for record in records)
        calibration.save(tmp_path / f"{name}.safetensors")
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys() and len(one) > 10
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_proteins_that_no_process_survives_are_named(tiny):
    with pytest.raises(
        RuntimeError, match=r"cannot be finished: its process died 3 times, with these proteins: b, a, c"
    ):
        calibrate_records(tiny, RECORDS, toks_per_batch=1, runner=Backwards(tiny, fails=True))


def test_first_records(tiny):
    assert [r.id for r in first_records(RECORDS)] == ["a", "b", "c"]
    assert [r.id for r in first_records(RECORDS, 280)] == ["a", "b", "c"]
    assert [r.id for r in first_records(RECORDS, 279)] == ["a", "b"]
    assert [r.id for r in first_records(RECORDS, 80)] == ["a"]
    with pytest.raises(ValueError, match="at least the first protein's 80, got 79"):
        first_records(RECORDS, 79)
    calibration = calibrate_records(tiny, RECORDS, max_residues=250)
    assert (calibration.provenance["sequences"], calibration.provenance["residues"]) == (2, 240)


@pytest.mark.parametrize("count", [0, 9, 10, 35])
def test_every_tenth_protein_is_held_out(count):
    records = [ProteinRecord(str(i), "ACDEF") for i in range(count)]
    kept, held_out = hold_out(records)
    assert [record.id for record in held_out] == [str(i) for i in range(9, count, 10)]
    assert sorted([*kept, *held_out], key=lambda record: int(record.id)) == records


def test_too_few_residues(tiny):
    with pytest.raises(ValueError, match="seen 3 residues, fewer than a head has components"):
        calibrate_records(tiny, [ProteinRecord("a", "MKT")])


def test_long_proteins_warn_once(tiny):
    records = [ProteinRecord(str(n), "MKTAYIAKQR" * 100 + "M" * n) for n in (22, 23, 24)]
    with pytest.warns(LongProteinWarning, match="2 proteins") as caught:
        calibrate_records(tiny, records, presets=[])
    assert len(caught) == 1
