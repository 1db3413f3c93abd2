"""Fixtures of several tasks: the small model of random weights at full precision, and an independent one beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import make_esm


@pytest.fixture
def exact(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> TurboEsm:
    """The small model under the preset `exact`."""
    return TurboEsm(tiny_model(), turbo.tokenizer)


@pytest.fixture(scope="session")
def hf() -> EsmForMaskedLM:
    """Hugging Face's model with the same weights."""
    return make_esm()


@pytest.fixture(scope="session")
def tiny_frozen(tiny_model: Callable[..., TurboEsmForMaskedLM], tmp_path_factory: pytest.TempPathFactory) -> FrozenEsm2:
    """An independent implementation with the same weights, in float64, whose contexts are frozen."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    return FrozenEsm2(folder)
