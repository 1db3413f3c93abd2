"""Tables of text, with every figure of the evaluation."""

from __future__ import annotations

import pytest

from esm_turbo import TurboEsm
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation
from esm_turbo.evaluate.evaluation import _small
from tests.helpers.evaluation import OFF, SEQUENCES


def test_table_shows_the_three_arms_with_their_figures(evaluation: Evaluation) -> None:
    text = evaluation.table()
    for arm in ("frozen - full", "paper - frozen", "paper - full"):
        assert text.count(arm) == 3, arm  # once under leave-one-out, once for each k
    accuracy = evaluation["paper"].leave_one_out.against_frozen
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper - frozen") and line.count("(") == 0]
    memory = evaluation["paper"].memory
    assert row.split()[3:5] == [f"{memory.bits_per_element:.2f}", f"{memory.ratio_to_fp16:.2f}"]
    assert row.split()[5:8] == [
        f"{accuracy.residues.cosine_mean:.5f}",
        f"{accuracy.residues.cosine_q01:.4f}",
        f"{accuracy.residues.cosine_min:.4f}",
    ]
    assert row.split()[-1] == f"{accuracy.special_tokens.cosine_mean:.5f}"
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper  ") and line.count(".") == 3]
    assert row.split()[1] == f"{memory.bits_per_element:.3f}"
    errors = [layer.relative_rms_error for layer in evaluation["paper"].leave_one_out.by_layer]
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper  ") and line.count(".") == 2]
    assert row.split()[1:] == [f"{error:.4f}" for error in errors]
    assert "mainly_alpha" in text
    # No control character is shown as an escape.
    assert "\\x" not in text


@pytest.mark.parametrize("width", [None, 120, 60, 20])
def test_no_figure_is_cut_at_any_width(evaluation: Evaluation, width: int | None) -> None:
    text = evaluation.table(width)
    assert "…" not in text
    assert set(evaluation.table().split()) - set(text.split()) <= {"─" * n for n in range(200)}


def test_the_overview_has_bits_and_figures_of_every_codec_by_arm(everything: Evaluation) -> None:
    first = everything.table().split("\n\n")[1:3]
    lines = [line.split() for line in "\n".join(first).splitlines()]
    assert ["arm", "bits", "x", "fp16", "cosine", "1", "%", "lowest", "KL,", "nats", "99", "%", "top-1"] in [
        line[:13] for line in lines
    ]
    rows = {tuple(line[:3]): line[3:] for line in lines if len(line) > 3 and line[1] == "-"}
    for name in list(PRESETS)[1:]:
        preset = everything[name]
        accuracy = preset.leave_one_out.against_frozen.residues
        found = rows[name, "-", "frozen"]
        assert found[:2] == [f"{preset.memory.bits_per_element:.2f}", f"{preset.memory.ratio_to_fp16:.2f}"]
        assert found[2:4] == [f"{accuracy.cosine_mean:.5f}", f"{accuracy.cosine_q01:.4f}"]
        assert float(found[5]) == pytest.approx(accuracy.kl_mean, rel=0.06, abs=5e-5)
        assert found[7] == f"{accuracy.top1_agreement:.4f}"
        assert rows[name, "-", "full"][0] == f"{preset.leave_one_out.against_full.residues.cosine_mean:.5f}"
    assert float(rows["frozen", "-", "full"][0]) == pytest.approx(everything["exact"].memory.bits_per_element, abs=0.01)


def test_skipped_proteins_are_counted(tiny: TurboEsm) -> None:
    result = tiny.evaluate(["MA", "MKT"], ["paper"], extend_ks=(3,), refresh_ws=(0,))
    assert "k = 3, 0 proteins (2 too short)" in result.table()


def test_parts_that_were_disabled_have_no_table(tiny: TurboEsm, evaluation: Evaluation) -> None:
    result = tiny.evaluate(SEQUENCES[:1], ["paper"], **OFF)
    assert result["paper"].extend == result.frozen.extend == ()
    text = result.table()
    assert "Leave-one-out" in text and "Memory of 1,024 tokens" in text
    assert "Extension" not in text and "by class" not in text
    assert "Extension" in evaluation.table() and "by class" in evaluation.table()


def test_full_precision_alone_has_one_row(tiny: TurboEsm) -> None:
    text = tiny.evaluate(SEQUENCES[:1], ["exact"], **OFF).table()
    assert "frozen - full" in text and "by layer" not in text


@pytest.mark.parametrize(("x", "text"), [(0.0, "0.0000"), (0.5, "0.5000"), (0.00123, "0.0012"), (0.00051, "5.1e-04")])
def test_small_figures_are_in_scientific_notation(x: float, text: str) -> None:
    assert _small(x) == text
