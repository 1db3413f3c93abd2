"""A small calibrated model, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.codecs.peers.hugging_face import QuantoCodec
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


def forget_packages(patch: pytest.MonkeyPatch) -> None:
    """As if neither quanto nor HQQ were installed."""

    def missing(*_: Any) -> Any:
        raise ValueError("codec 'quanto' needs optional packages") from ImportError("optimum.quanto")

    patch.setattr(QuantoCodec, "_new_layer", missing)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_packages(monkeypatch)


@pytest.fixture(scope="session")
def everything(tiny: TurboEsm) -> Evaluation:
    """Leave-one-out of all presets, without the optional packages."""
    with pytest.MonkeyPatch.context() as patch:
        forget_packages(patch)
        return tiny.evaluate(SEQUENCES[:1], "all", **OFF)
