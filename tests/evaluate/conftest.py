"""A small calibrated model, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.evaluate import Evaluation
from tests.helpers.evaluation import CLASSES, OFF, SEQUENCES


@pytest.fixture(scope="session")
def tiny(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> TurboEsm:
    """A small model of random weights with its calibration."""
    return TurboEsm(tiny_model(preset="paper"), turbo.tokenizer)


@pytest.fixture(scope="session")
def evaluation(tiny: TurboEsm) -> Evaluation:
    """All figures but those of outliers."""
    return tiny.evaluate(SEQUENCES, ["exact", "paper"], classes=CLASSES, extend_ks=(1, 18))


@pytest.fixture(scope="session")
def everything(tiny: TurboEsm) -> Evaluation:
    """Leave-one-out of all presets."""
    return tiny.evaluate(SEQUENCES[:1], "all", **OFF)
