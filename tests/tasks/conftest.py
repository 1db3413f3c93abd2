"""Models that the tests of several tasks share, each with an independent implementation to compare with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
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


@pytest.fixture(scope="session")
def slow() -> TurboEsm:
    """The embedded model on the reference backend."""
    return TurboEsm.from_pretrained(device="cpu", backend="reference")


@pytest.fixture(scope="session")
def mini_hf() -> EsmForMaskedLM:
    """Hugging Face's model with the embedded weights."""
    return EsmForMaskedLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def mini_frozen() -> FrozenEsm2:
    """An independent implementation with the embedded weights, in float64, whose contexts are frozen."""
    return FrozenEsm2(EMBEDDED_MODEL)
