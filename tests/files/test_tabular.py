"""Results as tables, and their short texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pandas
import pytest
import torch

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from esm_turbo.evaluate import Evaluation
from esm_turbo.files.extras import install_hint
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.scoring.score import Scores
from esm_turbo.tasks.variants import records as variants
from esm_turbo.tasks.variants.score import VariantScores

TARGET = "MKTAYIAKQRQISFVK"


class Numbers(Tabular):
    def __init__(self, count: int) -> None:
        self.count = count

    def __repr__(self) -> str:
        return named(self, counted(self.count, "number"))

    def columns(self) -> list[str]:
        return ["<n>", "text", "value"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        for number in range(self.count):
            yield number, "<b>" if number else None, number / 3


def test_a_frame_has_all_rows() -> None:
    frame = Numbers(12).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["<n>", "text", "value"] and len(frame) == 12
    assert frame["<n>"].tolist() == list(range(12)) and frame["value"].dtype == float
    assert list(Numbers(0).to_frame().columns) == ["<n>", "text", "value"]


def test_a_notebook_shows_the_first_rows() -> None:
    shown = Numbers(12)._repr_html_()
    assert shown.startswith("<p>Numbers(12 numbers)</p><table><tr><th>&lt;n&gt;</th>")
    assert shown.count("<tr>") == 11 and "to_frame()" in shown
    assert "<td>&lt;b&gt;</td>" in shown and "0.3333" in shown and "<td></td>" in shown
    assert "to_frame()" not in Numbers(10)._repr_html_()


def test_without_pandas_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=rf"^`to_frame` needs pandas: {re.escape(install_hint('frames'))}$"):
        Numbers(1).to_frame()
    assert Numbers(1)._repr_html_()


def test_short_texts() -> None:
    assert named(Numbers(1), "a", 2, b="x", c=None) == "Numbers(a, 2, b='x')"
    assert [counted(n, "row") for n in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]


@pytest.fixture(scope="module")
def scores(turbo: TurboEsm) -> Scores:
    return turbo.score(TARGET, ["ACDEF", "WTC", "GGGSG"], refresh=4)


def test_scores(scores: Scores) -> None:
    best = scores.scores[scores.ranking()[0]]
    perplexity, likelihood = round(best.pseudo_perplexity, 4), round(best.pseudo_log_likelihood, 4)
    text = f"CandidateScore({best.candidate!r}, pseudo_perplexity={perplexity}, pseudo_log_likelihood={likelihood})"
    assert repr(best) == text
    assert repr(scores) == (
        f"Scores(3 candidates, best {text}, model='esm2-mini', arm='turbo', preset='turbo3', place='masked', refresh=4)"
    )
    frame = scores.to_frame()
    assert frame["sequence"].tolist() == ["ACDEF", "WTC", "GGGSG"]
    assert frame["pseudo_perplexity"].tolist() == scores.pseudo_perplexities
    assert frame.sort_values("rank").index.tolist() == scores.ranking()
    shown = scores._repr_html_()
    places = [shown.index(f"<td>{scores.scores[index].candidate}</td>") for index in scores.ranking()]
    assert places == sorted(places)


def test_variants(turbo: TurboEsm) -> None:
    found: VariantScores = turbo.score_variants("MKTAY", ["M24A", "K25R", "M24C:T26S"], first_position=24)
    best = found.ranking()[0]
    assert found.values[best] == max(found.values)
    assert repr(found) == (
        f"VariantScores(3 variants of 5 residues, best {found.scores[best].variant} {found.values[best]:.4g},"
        " model='esm2-mini', method='masked', arm='turbo', preset='turbo3', refresh=4)"
    )
    frame = found.to_frame()
    assert frame[["mutant", "position", "wild_type_residue", "mutant_residue"]].values.tolist() == [
        ["M24A", 24, "M", "A"],
        ["K25R", 25, "K", "R"],
        ["M24C:T26S", "24;26", "M:T", "C:S"],
    ]
    assert frame["score"].tolist() == found.values
    # Positions are numbers where they can be.
    assert turbo.score_variants("MKTAY").to_frame()["position"].dtype == "int64"


def test_runs(turbo: TurboEsm) -> None:
    target = ProteinRecord("one", TARGET)
    run = scoring.score_records(
        turbo, [target], [scoring.Candidate("a", "AC", None, {"assay": "7"})], ["turbo", "full"]
    )
    assert repr(run) == "ScoringRun(1 target, 0 failed)"
    assert repr(run.results[0]) == "TargetResult(one, 1 candidate, arms=['turbo', 'full'])"
    assert run.to_frame()["assay"].tolist() == ["7", "7"]
    assert run.results[0].to_frame()["arm"].tolist() == ["turbo", "full"]
    of_variants = variants.score_records(turbo, [target], [variants.MeasuredVariant("M1A")], ["turbo"])
    assert repr(of_variants) == "VariantsRun(1 protein, 0 failed)"
    assert repr(of_variants.results[0]) == "ProteinVariants(one, 1 variant, arms=['turbo'])"
    assert of_variants.to_frame().loc[0, "position"] == 1


def test_generated_sequences(turbo: TurboEsm) -> None:
    made = turbo.generate("MK<mask>AY<mask>", positions=[3, 4], num_return_sequences=2, return_cache=False)
    assert repr(made) == "GenerationOutput(2 sequences, 2 new residues)"
    assert [
        sequence[:2] + new + "Y<mask>" for sequence, new in zip(made.sequences, made.new_residues, strict=True)
    ] == (made.sequences)
    frame = made.to_frame()
    assert frame["new_residues"].tolist() == made.new_residues
    assert frame["positions"].tolist() == ["3-4", "3-4"]
    assert frame["mean_log_prob"].tolist() == [sum(own) / 2 for own in made.log_probs]


def test_models_caches_and_stores(turbo: TurboEsm, tmp_path) -> None:
    assert repr(turbo) == "TurboEsm(esm2-mini, 12 layers x 4 heads x 64, preset turbo3, calibrated, float32, cpu)"
    cache: TurboKVCache = turbo.prefill(["MKT", "G"])
    assert repr(cache) == (
        f"TurboKVCache(turbo3, 12 layers x 4 heads x 64, 2 rows of up to 4 tokens, {cache.nbytes:,} bytes, cpu)"
    )
    assert repr(turbo.calibration).startswith("Calibration(")
    output = turbo.extend(cache, ["AC", "D"])
    hidden = output.hidden_states.shape[-1]
    assert repr(output) == (f"ExtendOutput(hidden_states=[2, 3, {hidden}], logits=[2, 3, 33], attention_mask=[2, 3])")
    [embedding] = turbo.embed("MKT", include="mean")
    assert repr(embedding) == f"ProteinEmbedding(mean_representations.12 [{hidden}])"
    store = ContextStore(tmp_path / "a", read_only=True)
    assert repr(store) == f"ContextStore({str(tmp_path / 'a')!r}, read_only=True)"
    assert torch.equal(cache.lengths, torch.tensor([4, 2]))


def test_evaluations(turbo: TurboEsm) -> None:
    found: Evaluation = turbo.evaluate(TARGET, ["exact", "turbo2"], extend_ks=())
    assert repr(found) == "Evaluation(esm2-mini, 1 protein, 16 residues, exact, turbo2)"
    frame = found.to_frame()
    assert frame["preset"].tolist() == ["exact", "turbo2"]
    assert frame["kl_mean"].tolist()[1] == found["turbo2"].leave_one_out.against_frozen.residues.kl_mean
