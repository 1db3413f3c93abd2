"""The map of variants: cells, tracks, and what is not in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import entropy

from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Lines, Scatter, Tracks
from esm_turbo.pictures.variant_map import effects, entropies, mean_effects, variant_sheet
from esm_turbo.tasks.variants.substitutions import all_substitutions
from tests.pictures.conftest import WILD_TYPE, scored


def test_every_score_is_in_the_cell_of_its_residue_and_position(variants) -> None:
    values = effects(variants, "turbo")
    assert values.shape == (20, 8) and np.isfinite(values).all()
    for variant, one in zip(variants.variants, variants.scores["turbo"].scores, strict=True):
        if ":" not in variant.variant:
            row, column = RESIDUE_ORDER.index(variant.variant[-1]), int(variant.variant[1:-1]) - 24
            assert values[row, column] == one.score
    assert [values[RESIDUE_ORDER.index(letter), index] for index, letter in enumerate(WILD_TYPE)] == [0.0] * 8


def test_means_leave_the_wild_type_out(variants) -> None:
    values = effects(variants, "turbo")
    own = [one.score for one in variants.scores["turbo"].scores[:19]]
    assert mean_effects(values, WILD_TYPE)[0] == pytest.approx(np.mean(own))


def test_entropies_are_those_of_the_predicted_distribution() -> None:
    log_probs = np.log(np.random.default_rng(0).dirichlet(np.ones(20), 3)).T
    values = log_probs - log_probs[4]
    expected = entropy(np.exp(log_probs), base=2, axis=0)
    np.testing.assert_allclose(entropies(values), expected, rtol=1e-12)
    values[7, 1] = np.nan
    assert np.isnan(entropies(values)).tolist() == [False, True, False]


def test_a_sheet_has_tracks_of_the_protein_and_the_measurements(variants) -> None:
    sheet = variant_sheet(variants, "model x")
    tracks, scatters = sheet.layout
    assert isinstance(tracks, Tracks)
    kinds = [type(panel) for panel in tracks.panels]
    assert kinds == [Lines, Lines, Heatmap, Lines]
    assert tracks.columns == list(range(24, 32)) and tracks.letters == list(WILD_TYPE)
    heatmap, difference = tracks.panels[2:]
    assert heatmap.centred and heatmap.rows == list(RESIDUE_ORDER)
    assert [(RESIDUE_ORDER[row], column) for row, column in heatmap.dots] == list(zip(WILD_TYPE, range(8), strict=True))
    assert heatmap.names[RESIDUE_ORDER.index("C")][0] == "M24C"
    full = effects(variants, "turbo") - effects(variants, "full")
    np.testing.assert_allclose(difference.series["turbo - full"], mean_effects(np.abs(full), WILD_TYPE))
    assert all(isinstance(panel, Scatter) for panel in scatters) and len(scatters) == 2
    assert len(scatters[0].x) == sum(one.measured is not None for one in variants.variants)
    assert "Spearman" in scatters[0].title
    assert "model x" in sheet.caption and "2 variants of several substitutions" in sheet.caption
    assert sheet.table.columns[-1] == "measured" and len(sheet.table.rows) == len(variants.variants)


@pytest.mark.parametrize(("method", "unit"), [("masked", "nats"), ("pseudo_perplexity", "nats per residue")])
def test_scores_of_whole_variants_are_per_residue(variants, method: str, unit: str) -> None:
    scores = {arm: replace(one, method=method) for arm, one in variants.scores.items()}
    tracks, scatters = variant_sheet(replace(variants, scores=scores), "").layout
    [heatmap] = [panel for panel in tracks.panels if isinstance(panel, Heatmap)]
    labels = [panel.y_label for panel in tracks.panels if isinstance(panel, Lines) and "bits" not in panel.y_label]
    assert labels == [f"mean effect\n({unit})", f"|arm - full|\n(mean, {unit})"]
    assert {heatmap.label, *(panel.y_label for panel in scatters)} == {f"score ({unit})"}
    several = [number for number, one in enumerate(variants.variants) if ":" in one.variant]
    own = scored(variants.variants[number].variant for number in several)
    own.scores["turbo"] = replace(own.scores["turbo"], method=method)
    [[bars]] = variant_sheet(own, "").layout
    assert bars.x_label == f"score ({unit})"


def test_one_variant_and_no_measurement() -> None:
    [tracks] = variant_sheet(scored(["K25R"]), "model x").layout
    # Without all residues of a position there is no entropy, and without the arm full no difference.
    assert [type(panel) for panel in tracks.panels] == [Lines, Heatmap]
    assert np.isfinite(tracks.panels[1].values).sum() == 2
    # The other seven positions are not shown.
    assert tracks.columns == [25] and tracks.letters == ["K"]
    assert tracks.panels[1].dots == [(RESIDUE_ORDER.index("K"), 0)]


@pytest.mark.parametrize(
    ("positions", "shown", "said"),
    [
        ((25,), [25], ["Only positions with scores are shown, 1 of 8."]),
        ((26, 27, 28), [26, 27, 28], ["Only positions with scores are shown, 3 of 8."]),
        (
            (24, 26, 31),
            [24, 26, 31],
            ["Only positions with scores are shown, 3 of 8.", "Gaps stand for positions left out."],
        ),
        # Half of them: the protein is a whole.
        ((24, 25, 28, 31), list(range(24, 32)), ["Grey was not scored."]),
        (tuple(range(24, 32)), list(range(24, 32)), []),
    ],
)
def test_where_most_positions_have_no_score_only_scored_ones_are_shown(positions, shown, said) -> None:
    result = scored(name for name in all_substitutions(WILD_TYPE, 24) if int(name[1:-1]) in positions)
    sheet = variant_sheet(result, "model x")
    [tracks] = sheet.layout
    means, entropy, heatmap = tracks.panels
    assert tracks.columns == heatmap.columns == means.x == entropy.x == shown
    assert tracks.letters == [WILD_TYPE[position - 24] for position in shown]
    expected = effects(result, "turbo")[:, [position - 24 for position in shown]]
    np.testing.assert_array_equal(heatmap.values, expected)
    for position, name in zip(shown, heatmap.names[RESIDUE_ORDER.index("C")], strict=True):
        assert name == f"{WILD_TYPE[position - 24]}{position}C"
    assert [(RESIDUE_ORDER[row], shown[column]) for row, column in heatmap.dots] == [
        (WILD_TYPE[position - 24], position) for position in positions
    ]
    sentences = ["Only positions", "Gaps stand", "Grey was"]
    assert all(sentence in sheet.caption for sentence in said)
    assert sum(sentence in sheet.caption for sentence in sentences) == len(said)


def test_variants_of_several_substitutions_alone_have_no_map() -> None:
    names = [f"M24{mutant}:K25R" for mutant in "ACDEFGHIKLNPQRSTVWYUO"]
    for count in (2, 20, 21):
        result = scored(names[:count])
        values = result.scores["turbo"].values
        sheet = variant_sheet(result, "")
        [[panel]] = sheet.layout
        if count > 20:
            assert isinstance(panel, Histogram) and panel.values.tolist() == values
        else:
            assert isinstance(panel, Bars) and panel.values.tolist() == sorted(values, reverse=True)
            assert dict(zip(panel.names, panel.values, strict=True)) == dict(zip(names, values, strict=False))
        # There are no colours to explain.
        assert "red" not in sheet.caption and f"{count} variants of several substitutions." in sheet.caption


def test_residues_without_a_row_are_left_out(variants) -> None:
    result = scored(["M24U", "M24A"], wild_type="MXTAYIAK")
    values = effects(result, "turbo")
    assert np.isfinite(values).sum() == 2
    assert values[RESIDUE_ORDER.index("A"), 0] == result.scores["turbo"].values[1]
    assert "1 variant by other residues than the 20: not in the map." in variant_sheet(result, "").caption
