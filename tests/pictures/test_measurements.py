"""Pictures of evaluations and calibrations show what these hold."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo.evaluate import Evaluation
from esm_turbo.files.quality import Figures, Quality
from esm_turbo.pictures.measurements import calibration_sheet, evaluation_sheet
from esm_turbo.pictures.panels import Bars, Heatmap, Lines
from tests.helpers.evaluation import SEQUENCES


@pytest.fixture(scope="module")
def evaluation(turbo) -> Evaluation:
    return turbo.evaluate(SEQUENCES[1::2], ["exact", "turbo3", "turbo2"], extend_ks=(1,), refresh_ws=(0, 4))


def test_an_evaluation(evaluation) -> None:
    sheet = evaluation_sheet(evaluation)
    (kl, cosine), (layers,), (freezing,) = sheet.layout
    # Full precision has no error to compare.
    assert kl.names == ["turbo3", "turbo2"] == list(layers.series)
    expected = [evaluation[name].leave_one_out.against_frozen.residues for name in kl.names]
    assert kl.y.tolist() == [one.kl_mean for one in expected]
    assert cosine.y.tolist() == [1 - one.cosine_mean for one in expected]
    assert list(layers.x) == list(range(1, 13))
    assert list(freezing.x) == [0, 4] and list(freezing.series)[-1] == "freezing error"
    found = [1 - entry.against_full.residues.cosine_mean for entry in evaluation.frozen.extend]
    assert freezing.series["freezing error"].tolist() == pytest.approx(found)
    assert "esm2-mini" in sheet.caption and "2 proteins" in sheet.title


def test_a_calibration(turbo) -> None:
    sheet = calibration_sheet(turbo.calibration)
    [*measured, composition, spectra, bits] = sheet.layout
    assert len(measured) == (turbo.calibration.quality is not None)
    assert all(isinstance(panel, Bars) for panel in composition)
    assert sum(composition[0].values) == turbo.calibration.provenance["residues"]
    assert all(isinstance(panel, Heatmap) and panel.values.shape == (12, 64) for panel in [*spectra, *bits])
    for panel in spectra:
        assert (np.diff(panel.values, axis=1) <= 1e-9).all()
    # Three bits per number on average, keys and values together.
    assert np.mean([panel.values.mean() for panel in bits]) == pytest.approx(3)


def test_what_was_measured_of_a_calibration(turbo, monkeypatch) -> None:
    figures = Figures(0.99, 0.98, 0.002, 0.01, 0.9)
    quality = Quality(3, 300, "", "float32", "cpu", {"turbo3": figures, "exact": figures}, 8, {0: figures, 8: figures})
    monkeypatch.setattr(turbo.calibration, "quality", quality)
    bars, lines = calibration_sheet(turbo.calibration).layout[0]
    assert (bars.names, bars.values.tolist()) == (["turbo3"], [0.002])
    assert isinstance(lines, Lines) and lines.series["freezing error"].tolist() == pytest.approx([0.01, 0.01])
    # One line has no legend, so its axis says what it is.
    assert lines.y_label == "freezing error, 1 - mean cosine"
