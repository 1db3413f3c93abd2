"""Evaluation of exact contexts: compression is their only error."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch

from esm_turbo import KVCalibrator, TurboEsm, calibrate_records
from esm_turbo.assets import calibration_families, evaluation_families
from esm_turbo.evaluate.calibrated import measure_calibration
from esm_turbo.evaluate.families import masked_rows
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict
from esm_turbo.proteins.homologs import join_families
from tests.helpers.models import E1_MINI

FAMILY = ["MKTAYIAKQRQISFVKSHFSRQ", "MKSAYLAKQRHISFIKAHFSRQLEE", "MRTAFIAKQKTAFIAKQHISFIK", "MKTAYLAKQRQVSF"]
GIVEN = [",".join(FAMILY), "MKXAYIAKQ,MKTAYIAXQRQ"]


@pytest.fixture(scope="module")
def e1() -> TurboEsm:
    e1 = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="exact")
    ids = [*chain(*(e1.codes.whole(e1.codes.encode(one, "it")) for one in FAMILY))]
    calibrator = KVCalibrator(e1.model).partial_fit(torch.tensor([ids]))
    e1.model.set_turbo(calibration=calibrator.finalize(["turbo4", "turbo1"]), preset="exact")
    return e1


def test_every_residue_is_masked_once() -> None:
    rows = masked_rows("ACDEFGHIKLMNPQRST", "?")
    assert rows[0] == "?CDEFGH?KLMNPQ?ST" and len(rows) == 7
    assert [sum(row[i] == "?" for row in rows) for i in range(17)] == [1] * 17
    assert masked_rows("AC", "?") == ["?C", "A?"]
    assert masked_rows("XAXC", "?") == ["X?XC", "XAX?"] and not masked_rows("XX", "?")


def test_x_keeps_its_position(e1: TurboEsm) -> None:
    """Whoever cuts it out measures another protein."""
    kept, cut = (
        e1.evaluate(f"{FAMILY[0]},{query}", ["turbo1"])["turbo1"].leave_one_out.against_frozen.residues
        for query in ("MKTXAYIAKQ", "MKTAYIAKQ")
    )
    assert kept.tokens == cut.tokens == 9 and kept.kl_mean != pytest.approx(cut.kl_mean, rel=1e-3)


def test_compression_is_the_only_error(e1: TurboEsm) -> None:
    found = e1.evaluate(GIVEN, ["exact", "turbo4", "turbo1"], names=["several", "unknown"])
    frozen = found.frozen.leave_one_out
    # Rounding of float32.
    assert frozen.residues.tokens == 14 + 10 and frozen.residues.kl_mean < 1e-6
    assert frozen.special_tokens.tokens == 4 and frozen.special_tokens.kl_mean < 1e-6
    turbo4, turbo1 = (found[name].leave_one_out.against_frozen.residues for name in ("turbo4", "turbo1"))
    assert 1e-7 < turbo4.kl_mean < turbo1.kl_mean / 4
    assert not found.frozen.extend and not found["turbo4"].extend
    assert "turbo4" in found.table()


@torch.no_grad()
def test_whole_forwards_of_two_precisions_have_the_homologs(e1: TurboEsm) -> None:
    half = TurboEsm(copy.deepcopy(e1.model).bfloat16(), e1.tokenizer)
    precision = half.evaluate(GIVEN, ["exact"], reference=e1).precision
    divergence = []
    for given in GIVEN:
        # `<bos> 1 ... 2 <eos>` around each sequence; X is left out, and keeps its place.
        text = [token for one in given.split(",") for token in ("<bos>", "1", *one, "2", "<eos>")]
        places = [place for place, token in enumerate(text) if token != "X"]
        ids = torch.tensor([e1.tokenizer.convert_tokens_to_ids([text[place] for place in places])])
        own = slice(-2 - len(given.split(",")[-1].replace("X", "")), -2)
        full, found = (one.model(ids, None, torch.tensor([places])).logits[0, own].double() for one in (e1, half))
        difference = full.log_softmax(-1) - found.log_softmax(-1)
        divergence.append((full.softmax(-1) * difference).sum(-1))
    assert precision is not None and precision.residues.tokens == 14 + 10
    assert precision.residues.kl_mean == pytest.approx(torch.cat(divergence).mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ("MKTAY", "lonely: .*no homolog is given"),
        ("MKTAY,", "lonely: holds no residues"),
        ("MKTAY,XX", "lonely: holds no residue but X"),
        ("MK?AY,MKT", "lonely: position 3 is a mask, which only a query may have"),
        ("MKT,,MKT", "lonely, homolog 2: holds no residues"),
        ("MKT\nMKA,MKT", "lonely: has white space inside; remove it, or separate homologs by commas"),
    ],
)
def test_bad_families_are_refused(e1: TurboEsm, sequence: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        e1.evaluate([sequence], ["exact"], names=["lonely"])


def test_records_are_joined_by_family() -> None:
    records = [ProteinRecord(f"r{i}", "MKTAY"[i:], f"family={i % 2} more") for i in range(5)]
    joined = join_families([records[0], ProteinRecord("alone", "MK"), *records[1:]])
    assert [(one.id, one.sequence) for one in joined] == [("r0", "MKTAY,TAY,Y"), ("r1", "KTAY,AY")]
    assert join_families(joined) == joined
    with pytest.raises(ValueError, match="there are no families of homologs"):
        join_families([ProteinRecord("alone", "MK"), records[0], records[1]])


def test_calibration_and_its_figures(e1: TurboEsm) -> None:
    """As `esm-turbo calibrate` runs it, on a few families."""
    records = [ProteinRecord(f"a{i}", one, "family=a") for i, one in enumerate(FAMILY)]
    calibration = calibrate_records(e1, records, presets=["turbo3"])
    counts = {"sequences": len(FAMILY), "residues": sum(map(len, FAMILY))}
    about = calibration.provenance
    assert about["classes"] == {"unknown": counts} and about["lengths"] == {"1-100": counts}
    assert {name: about[name] for name in counts} == counts
    held_out = [ProteinRecord("b", GIVEN[1])]
    quality = measure_calibration(e1, calibration, records, held_out)
    assert quality is not None and quality.residues == 11 and not quality.freezing
    assert set(quality.presets) == {"turbo3"} and quality.presets["turbo3"].kl_mean > 0
    with pytest.raises(ValueError, match="there are no families of homologs"):
        calibrate_records(e1, [ProteinRecord("alone", "MKTAY" * 20)])


def test_shipped_families_share_little() -> None:
    families, held_out = (read_fasta_strict(path()) for path in (calibration_families, evaluation_families))
    assert len(join_families(families)) == 64 and len(join_families(held_out)) == 60
    known = {one.sequence[i : i + 10] for one in held_out for i in range(len(one.sequence) - 9)}
    assert max(sum(one.sequence[i : i + 10] in known for i in range(len(one.sequence) - 9)) for one in families) < 3
