"""Figure 5: presets on models with planted outliers."""

from __future__ import annotations

from typing import Any

import pytest

from esm_turbo import Calibration, TurboEsm
from esm_turbo.assets import calibration_proteins
from esm_turbo.evaluate import Evaluation, outliers
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict
from tests.helpers.evaluation import SEQUENCES


@pytest.fixture(scope="module")
def with_outliers(tiny: TurboEsm) -> Evaluation:
    return tiny.evaluate(
        SEQUENCES,
        ["exact", "paper"],
        extend_ks=(),
        outlier_scales=(1, 200),
        outlier_proteins=2,
        outlier_calibration_proteins=3,
    )


def test_outliers_preserve_the_model_and_degrade_the_paper_preset(with_outliers: Evaluation) -> None:
    setup = with_outliers.outliers
    assert setup is not None
    assert (setup.proteins, setup.calibration_proteins) == (2, 3)
    assert [model.scale for model in setup.models] == [1, 200]
    assert setup.models[0].drift.residues.relative_rms_error == 0.0
    assert 0.0 < setup.models[1].drift.residues.relative_rms_error < 1e-5
    assert with_outliers["exact"].outliers == ()
    mild, wild = with_outliers["paper"].outliers
    assert (mild.scale, wild.scale) == (1, 200)
    assert mild.against_frozen.residues.tokens == len(SEQUENCES[0]) + len(SEQUENCES[1])
    assert wild.against_frozen.residues.relative_rms_error > 1.5 * mild.against_frozen.residues.relative_rms_error


def test_every_scale_is_calibrated_on_the_same_proteins(tiny: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = outliers.calibrate_records, []

    def watched(turbo: TurboEsm, records: list[ProteinRecord], **options: Any) -> Calibration:
        calls.append([record.id for record in records])
        assert turbo.model is not tiny.model
        return honest(turbo, records, **options)

    monkeypatch.setattr(outliers, "calibrate_records", watched)
    tiny.evaluate(
        SEQUENCES, ["paper"], extend_ks=(), outlier_scales=(1, 10), outlier_proteins=1, outlier_calibration_proteins=3
    )
    first = [record.id for record in read_fasta_strict(calibration_proteins())[:3]]
    assert calls == [first, first]
