"""Fixtures that all tests share: the embedded model, and small models of random weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

# Before transformers is imported: no test but those marked `network` may look for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from transformers import EsmForMaskedLM

from esm_turbo import Calibration, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import TurboConfig
from tests.helpers.models import CACHE_CONFIGS, E1_MINI, make_calibration, make_esm, random_ids

# Results must not depend on the machine's cores, and several workers share them.
torch.set_num_threads(1)
# Nor on its speed.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def modes_only_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes of PyTorch that a test enters change no result: contexts may be kept."""
    monkeypatch.setattr("esm_turbo.files.identity.active_modes", lambda: "")


@pytest.fixture(autouse=True)
def as_signals_were() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM outlive no test: a command run in this process ignores both once it is done."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def turbo() -> TurboEsm:
    """The embedded model with its shipped calibration, float32 on the CPU. Do not change it: all tests share it."""
    return TurboEsm.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def e1() -> TurboEsm:
    """The small model of the E1 architecture, with exact contexts. Do not change it: all tests of a module share it."""
    return TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="exact")


@pytest.fixture(scope="session")
def tiny_esm() -> Callable[..., EsmForMaskedLM]:
    """Makes Hugging Face models of random weights: `tiny_esm(head_dim=16, heads=4, layers=2, seed=0, **config)`."""
    return make_esm


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., TurboEsmForMaskedLM]:
    """Makes models of random weights.

    `tiny_model(preset="exact", calibrated=False, backend="auto", **as tiny_esm)`. Where the preset needs a
    calibration, or `calibrated` says so, one is made of random residues. Every call gives a model of its own.
    """
    calibrations: dict[str, Calibration] = {}

    def make(
        *,
        preset: str | TurboConfig = "exact",
        calibrated: bool = False,
        backend: str = "auto",
        **esm: object,
    ) -> TurboEsmForMaskedLM:
        model = make_esm(**esm)
        calibration = None
        if calibrated or TurboConfig.from_preset(preset).codec != "exact":
            key = repr(sorted(esm.items()))
            if key not in calibrations:
                calibrations[key] = make_calibration(model)
            calibration = calibrations[key]
        return TurboEsmForMaskedLM.from_esm(model, calibration=calibration, preset=preset, backend=backend)

    return make


@pytest.fixture(scope="session")
def random_proteins() -> Callable[..., tuple[Tensor, Tensor]]:
    """`random_proteins([12, 7], seed=0, masks=0, cls=True, eos=False)`: `input_ids` and `attention_mask`."""
    return random_ids


@pytest.fixture(params=CACHE_CONFIGS)
def cache_config(request: pytest.FixtureRequest) -> TurboConfig:
    """Options of the kinds of caches there are: exact, compressed, and compressed with special tokens apart."""
    return CACHE_CONFIGS[request.param]
