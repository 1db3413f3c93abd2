"""What commands print: units, values, and tables."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from rich.console import Console

from esm_turbo import TurboEsm
from esm_turbo.cli.report import bytes_text, calibration_report, info_report
from esm_turbo.cli.score_report import score_report, variants_report
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.scoring.records import Candidate, read_candidates, score_records
from esm_turbo.tasks.scoring.score import CandidateScore
from esm_turbo.tasks.scoring.screens import compare
from esm_turbo.tasks.scoring.specificity import BackgroundFigures
from esm_turbo.tasks.variants.records import MeasuredVariant
from esm_turbo.tasks.variants.records import score_records as score_variant_records

TARGETS = [ProteinRecord("one", "MKTAYIAKQRQISFVKSHFSRQ"), ProteinRecord("two", "GSWKDLAEPLLKRRVWTC")]


def lines_of(parts: Sequence[object], width: int = 200) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return out.getvalue().splitlines()


def row(lines: Sequence[str], *start: str) -> list[str]:
    """Cells of the only row that starts with these."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    [found] = [one for one in cells if one[: len(start)] == list(start)]
    return found


def test_the_best_candidates_of_every_target_and_the_agreement(turbo: TurboEsm, tmp_path) -> None:
    (tmp_path / "candidates.fasta").write_text(">a\nACDEF\n>b\nWTC\n>c\nGGGSG\n")
    candidates, _ = read_candidates(tmp_path / "candidates.fasta", TARGETS)
    run = score_records(turbo, TARGETS, candidates, ("turbo", "full"), top_k=2)
    lines = lines_of(score_report(run, 2))
    for result in run.results:
        assert f"{result.target.id}, {len(result.target.sequence)} residues" in [line.strip() for line in lines]
        best = result.ranking()[0]
        perplexities = [f"{result.scores[arm].scores[best].pseudo_perplexity:.3f}" for arm in ("turbo", "full")]
        likelihood = f"{result.scores[result.reference].scores[best].pseudo_log_likelihood:.2f}"
        first = [line for line in lines if line.startswith("│ 1 ")]
        assert any(all(number in line for number in (*perplexities, likelihood)) for line in first)
        agreement = result.agreement["turbo"]
        cells = row(lines, result.target.id, "turbo")
        assert cells[2:4] == [f"{agreement.spearman:.4f}", f"{agreement.top_k_overlap:.2f}"]
        assert cells[4] == f"{agreement.mean_difference:.4f}"
    assert sum(line.strip() == "and 1 more" for line in lines) == 2
    assert any("top 2 shared" in line for line in lines)
    mean = sum(result.agreement["turbo"].mean_difference for result in run.results) / 2
    assert row(lines, "mean", "turbo")[-1] == f"{mean:.4f}"


def test_many_targets_have_a_row_each_unless_asked(turbo: TurboEsm) -> None:
    targets = [ProteinRecord(f"t{i}", "MKTAY" + "G" * i) for i in range(4)]
    run = score_records(turbo, targets, [Candidate("a", "AC"), Candidate("b", "WT")], ("turbo", "full"))
    lines = lines_of(score_report(run, None))
    for result in run.results:
        best = result.ranking()[0]
        perplexities = [f"{result.scores[arm].scores[best].pseudo_perplexity:.3f}" for arm in ("turbo", "full")]
        candidate = result.candidates[best]
        count = str(len(result.target.sequence))
        expected = [result.target.id, count, "2", candidate.id, candidate.sequence, *perplexities]
        assert row(lines, result.target.id) == expected
    mean = sum(result.agreement["turbo"].mean_difference for result in run.results) / 4
    assert row(lines, "mean", "turbo")[-1] == f"{mean:.4f}"
    lines = lines_of(score_report(run, 1))
    assert sum(line.strip() == "and 1 more" for line in lines) == 4
    assert row(lines, "t3", "turbo")


def test_a_summary_shows_the_exact_value_of_the_best_and_how_far_it_moved(turbo: TurboEsm) -> None:
    targets = [ProteinRecord(f"t{i}", "MKTAYIAKQRQISF" + "G" * i) for i in range(4)]
    candidates = [Candidate(name, name) for name in ("AC", "WT", "GSGS")]
    run = score_records(turbo, targets, candidates, ("turbo",))
    # As if the arm full exchanged the first two.
    for result in run.results[1:]:
        best, second, _ = result.ranking()
        scores = result.scores["turbo"]
        result.scores["turbo"] = replace(scores, rescored={best: scores.scores[second], second: scores.scores[best]})
    report = score_report(run, None)
    lines = lines_of(report)
    header = next(line for line in lines if "by full" in line)
    assert [cell.strip() for cell in header.split("┃")[-3:-1]] == ["full", "by full"]
    assert row(lines, "t0")[-2:] == ["", ""]
    for result in run.results[1:]:
        first = result.ranking()[1]
        exact = result.rescored[first].pseudo_perplexity
        assert row(lines, result.target.id)[1] == result.candidates[first].id
        assert row(lines, result.target.id)[-2:] == [f"{exact:.3f}", "1 (+1)"]
    assert any(line.startswith("--top 10 shows ten candidates of each target") for line in lines)
    assert lines[-1] == "compare ranks: single values are approximate, except those by full"


@pytest.mark.parametrize(("contexts", "unit"), [(5, "s.d."), (4, "nats")])
def test_the_exact_specificity_that_ranks_is_shown(turbo: TurboEsm, contexts: int, unit: str) -> None:
    candidates = [Candidate(name, name) for name in ("AC", "WT", "GSGS")]
    run = score_records(turbo, TARGETS[:1], candidates, ("turbo",))
    background = {one.id: BackgroundFigures(-3.0, 0.5, contexts) for one in candidates}
    [result] = run.results
    scores = replace(result.scores["turbo"], sort_by="specificity").with_background(background, "decoys")
    last = scores.ranking()[-1]
    residues = scores.scores[last].candidate
    exact = replace(scores, scores=(CandidateScore(residues, (-2.0,) * len(residues), background[residues]),))
    result = replace(result, scores={"turbo": scores.with_exact([last], exact)})
    run.results = [result]
    lines = lines_of(score_report(run, None))
    header = next(line for line in lines if "by full" in line)
    assert [cell.strip() for cell in header.split("┃")[-5:-1]] == [unit, "full", f"full, {unit}", "by full"]
    specificity = "2.0000" if unit == "s.d." else "1.0000"
    assert row(lines, "3")[-3:] == ["7.389", specificity, "1 (+2)"]
    assert row(lines, "1")[-3:] == ["", "", ""]
    assert lines[-1].endswith("except those by full")


def test_a_summary_shows_one_unit(turbo: TurboEsm) -> None:
    """Candidates of a few targets have nats alone, those of many are ranked by standard deviations."""
    targets = [ProteinRecord(name, "MKTAYIAKQRQISF") for name in "wxyz"]
    run = score_records(turbo, targets, [Candidate("a", "AC")], ("full",))
    for number, result in enumerate(run.results):
        figures = BackgroundFigures(-3.0, 0.5, 2 if number == 0 else 9)
        scores = replace(result.scores["full"], sort_by="specificity").with_background({"AC": figures}, "targets")
        run.results[number] = replace(result, scores={"full": scores})
    lines = lines_of(score_report(run, None))
    assert any("nats" in line and "┃" in line for line in lines) and not any("s.d." in line for line in lines)
    for result in run.results:
        assert row(lines, result.target.id)[-1] == f"{result.scores['full'].scores[0].specificity:.4f}"
    caption = "ranked by specificity, of each target in its unit, against 2 to 9 other targets"
    assert any(line.strip() == caption for line in lines)


@pytest.mark.parametrize("arms", [("turbo", "frozen", "full"), ("turbo",)])
def test_tables_of_120_columns_break_no_word(turbo: TurboEsm, arms: tuple[Arm, ...]) -> None:
    targets = [ProteinRecord(f"serine_protease_fragment_{i}", "MKTAYIAKQRQISF" + "G" * i) for i in range(4)]
    candidates = [Candidate("peptide_1", "ACDEFGHIKLMNPQRSTVWY" * 2), Candidate("peptide_2", "WTC")]
    run = score_records(turbo, targets, candidates, arms)
    compare(run, "targets")
    words = ["candidate", "sequence", "perplexity", "specificity"]
    if "full" not in arms:
        words.append("by full")
        for result in run.results:
            scores = result.scores["turbo"]
            result.scores["turbo"] = replace(scores, rescored=dict(enumerate(scores.scores)))
    for top in (None, 2):
        text = "\n".join(lines_of(score_report(run, top), 120))
        assert max(map(len, text.splitlines())) <= 120
        for word in words:
            assert re.search(f"[┃ ]{word} *┃", text), word
        # In fewer columns, text gives way before numbers do.
        narrow = "\n".join(lines_of(score_report(run, top), 104))
        assert "perplexity ┃" in narrow and "specificity ┃" in narrow and "…" in narrow
        # In 80, columns of other numbers do.
        lines = lines_of(score_report(run, top), 80)
        assert max(map(len, lines)) <= 80
        first = next(line.split("│")[1:-1] for line in lines if line.startswith(("│ 1 ", "│ serine_")))
        assert all(len(cell.strip()) >= 9 for cell in first[top is not None :][: 3 - (top is not None)])
        assert "full" in arms or any("by full" in line for line in lines)
        assert any("in a wider terminal" in line for line in lines)
        # A sequence that does not fit is cut off.
        assert top is None or re.search("│ ACD[A-Y]*… *│", text)


def test_summaries_are_bounded(turbo: TurboEsm) -> None:
    targets = [ProteinRecord(f"t{i}", "MKTAY") for i in range(23)]
    run = score_records(turbo, targets, [Candidate("a", "AC")], ("full",))
    lines = lines_of(score_report(run, None))
    assert sum(line.startswith("│ t") for line in lines) == 20
    assert any("and 3 more, see --out" in line for line in lines)
    variants = score_variant_records(turbo, targets, [MeasuredVariant("M1A")], ("full",), method="wild_type")
    lines = lines_of(variants_report(variants, None))
    assert sum(line.startswith("│ t") for line in lines) == 20
    assert any("and 3 more, see --out" in line for line in lines)


def test_one_arm_has_no_agreement(turbo: TurboEsm, tmp_path) -> None:
    (tmp_path / "candidates.fasta").write_text(">a\nACDEF\n")
    candidates, _ = read_candidates(tmp_path / "candidates.fasta", TARGETS[:1])
    [table, said] = score_report(score_records(turbo, TARGETS[:1], candidates, ("turbo",)), 10)
    assert said == "compare ranks: single values are approximate; --rescore, or --arm full, computes them exactly"
    assert len(score_report(score_records(turbo, TARGETS[:1], candidates, ("full",)), 10)) == 1
    assert not any("more" in line or "agreement" in line for line in lines_of([table]))


def test_variants_by_score_with_their_arms(turbo: TurboEsm) -> None:
    run = score_variant_records(turbo, [ProteinRecord("wt", "MKTAYIAK")], None, ("turbo", "full"))
    [result] = run.results
    lines = lines_of(variants_report(run, 3))
    assert any("wt: 152 variants, masked marginals" in line for line in lines)
    assert any(line.strip() == "top 3 by turbo" for line in lines)
    best = max(range(152), key=result.scores["turbo"].values.__getitem__)
    cells = row(lines, result.variants[best].variant)
    assert cells[1:] == [f"{result.scores[arm].values[best]:.4f}" for arm in ("turbo", "full")]
    assert row(lines, "turbo", "turbo3")[2:] == [f"{result.against_full('turbo'):.4f}"]
    assert not any("measured" in line for line in lines)
    assert any("mutant minus that of the wild type, nats" in line for line in lines)
    assert not any("top" in line for line in lines_of(variants_report(run, 0)))
    deletion = [MeasuredVariant("K2del")]
    run = score_variant_records(turbo, [ProteinRecord("wt", "MKT")], deletion, ("turbo",), method="pseudo_perplexity")
    lines = lines_of(variants_report(run, None))
    assert any("of the wild type's, nats per residue" in line for line in lines)


def test_measurements_have_columns_where_there_are_any(turbo: TurboEsm) -> None:
    variants = [MeasuredVariant("M1A", 0.5), MeasuredVariant("K2R"), MeasuredVariant("T3S", 1.5)]
    run = score_variant_records(turbo, [ProteinRecord("wt", "MKTAYIAK")], variants, ("turbo",))
    lines = lines_of(variants_report(run, None))
    assert row(lines, "turbo", "turbo3") == ["turbo", "turbo3", f"{run.results[0].against_measured('turbo'):.4f}"]
    assert row(lines, "T3S")[1] == "1.5000" and row(lines, "K2R")[1] == "-"


def test_many_proteins_have_a_row_each(turbo: TurboEsm) -> None:
    proteins = [ProteinRecord(f"p{i}", "MKTA" + "G" * i) for i in range(4)]
    run = score_variant_records(turbo, proteins, None, ("turbo", "full"), method="wild_type")
    lines = lines_of(variants_report(run, None))
    for result in run.results:
        values = result.scores["full"].values
        best = max(range(len(values)), key=values.__getitem__)
        cells = row(lines, result.wild_type.id, str(len(values)), "full")
        assert cells[3:6] == [f"{fmean(values):.4f}", result.variants[best].variant, f"{values[best]:.4f}"]
        assert row(lines, result.wild_type.id, str(len(values)), "turbo")[6] == f"{result.against_full('turbo'):.4f}"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.9 * 2**30, "1.9 GiB"), (2**51, "2048.0 TiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_calibration_by_class_and_length(turbo: TurboEsm) -> None:
    record = turbo.calibration.provenance
    quality = turbo.calibration.quality
    result = {"out": "c.safetensors", "provenance": record, "bytes": 2**20, "quality": quality.to_dict()}
    text = "\n".join(lines_of(calibration_report(result, turbo.calibration.geometry), 120))
    assert "c.safetensors, 1.0 MiB" in text.replace("\n", " ")
    for name, group in {**record["classes"], **record["lengths"]}.items():
        [row] = [line.split() for line in text.splitlines() if name in line.split()]
        assert f"{group['sequences']:,}" in row and f"{group['residues']:,}" in row
    assert f"calibrated on {record['sequences']:,} proteins" in text.replace("\n", " ")
    for name, figures in quality.presets.items():
        [row] = [line.split("│") for line in text.splitlines() if line.startswith(f"│ {name} ")]
        assert row[2].strip() == f"{figures.cosine_mean:.5f}" and row[-2].strip() == "yes"


def test_values_of_every_type() -> None:
    result = {
        "kind": "cache",
        "geometry": {"num_layers": 2, "num_heads": 4, "head_dim": 16},
        "lengths": [11, 4],
        "options": {"bits": 3},
        "calibrated": True,
        "bits_per_element": 3.14159,
        "bytes": 12345,
        "cache": {"batch_size": 3, "tokens": 1024, "presets": {"exact": sizes(4096.0, 32.0, 1.0)}},
        "environment": {"torch": "2.11"},
        "truncation": None,
    }
    rows = {tuple(line.split()) for line in lines_of(info_report(result), 120)}
    for row in (
        "geometry 2 layers x 4 heads x 16",
        "lengths 11, 4",
        "options bits 3",
        "calibrated yes",
        "bits per element 3.142",
        "bytes 12,345",
        "cache of 3 x 1,024 tokens",
        "│ exact │ 4.0 KiB │ 32.00 │ 1.00x │",
        "torch 2.11",
    ):
        assert tuple(row.split()) in rows, row
    # What has no value is left out.
    assert not any("truncation" in row for row in rows)


def test_a_store_without_look_ups_has_no_rates() -> None:
    usage = {"looked_up": 0, "damaged": 0, "hit_rate": None, "hit_rates": {"device": None, "host": 0.25}}
    presets = [{"preset": "turbo3", "contexts": 2, "bytes": 2048}]
    named = {"kind": "context_store", "model": None, "precision": None}
    result = named | {"contexts": 2, "bytes": 2048, "usage": usage, "presets": presets}
    rows = {tuple(line.split()) for line in lines_of(info_report(result), 120)}
    for row in ("model none yet", "bytes 2.0 KiB", "hits -", "hits host 25.0 %", "│ turbo3 │ 2 │ 2.0 KiB │"):
        assert tuple(row.split()) in rows, row


def sizes(count: float, bits: float, ratio: float) -> dict[str, float]:
    return {"bytes": count, "bits_per_element": bits, "ratio_to_fp32": ratio}
