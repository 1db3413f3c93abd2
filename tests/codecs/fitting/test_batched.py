"""Quantisers of many samples at once, against those of one sample after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.calibration import Calibration
from esm_turbo.codecs.fitting import batched
from esm_turbo.codecs.fitting import lloyd_max as reference
from esm_turbo.files.kinds import CALIBRATION_FILE
from tests.codecs.fitting.test_lloyd_max import HARD_SAMPLES, mean_squared_error

PRESETS = ("paper", "turbo4", "turbo2")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("levels", [2, 5, 16])
def test_levels_are_those_of_the_reference(device: str, levels: int) -> None:
    rows = np.stack([x[:4000] for x in HARD_SAMPLES.values()])
    found = batched.lloyd_max(torch.from_numpy(rows).to(device), levels).cpu().numpy()
    for name, row, one in zip(HARD_SAMPLES, rows, found, strict=True):
        expected = reference.lloyd_max(row, levels)
        # Several quantisers of a sample with ties may be as good.
        errors = [mean_squared_error(row, levels_of) for levels_of in (one, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-3, abs=1e-12), name
        if name in ("gaussian", "laplace", "student, 2 degrees"):
            np.testing.assert_allclose(one, expected, rtol=1e-9)


def test_rows_do_not_depend_on_each_other() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_t(3, (131, 600)).astype(np.float32))
    found = batched.lloyd_max(rows, 4)
    assert torch.equal(found[[130, 1]], batched.lloyd_max(rows[[130, 1]], 4))


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 5)), min_size=1, max_size=40),
    st.sampled_from([2, 6, 256]),
)
def test_steps_are_those_of_the_reference(pairs: list[tuple[float, int]], levels: int) -> None:
    # One that is not zero, so that a step is best.
    x, w = (np.array(column, dtype=np.float64) for column in zip(*pairs, (1.0, 1), strict=True))
    parts = batched.Magnitudes(torch.from_numpy(x), torch.from_numpy(w)), reference.Magnitudes(x, w)
    found, expected = (reference.pooled_uniform_quantizer([part], levels).distortion for part in parts)
    # Several steps of a small sample may be as good.
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_a_large_sample_are_those_of_the_reference(device: str) -> None:
    rng = np.random.default_rng(2)
    x, w = np.round(rng.standard_t(4, (3, 2000)), 2), rng.gamma(1, 1, (3, 2000)) * (rng.random((3, 2000)) < 0.9)
    parts = [batched.Magnitudes(*(torch.from_numpy(y).to(device) for y in pair)) for pair in zip(x, w, strict=True)]
    for levels in (2, 16, 256):
        expected = reference.pooled_uniform_quantizer(
            [reference.Magnitudes(*p) for p in zip(x, w, strict=True)], levels
        )
        found = reference.pooled_uniform_quantizer(parts, levels)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.gpu
def test_a_fit_on_a_device_is_that_of_the_cpu() -> None:
    shipped = Calibration.load(EMBEDDED_MODEL / CALIBRATION_FILE)
    fits = []
    for device in ("cpu", "cuda"):
        one = Calibration(shipped.statistics, shipped.fingerprint, {})
        fits.append(one.fit(PRESETS, device=torch.device(device)))
    for preset in PRESETS:
        states = [fit.codec(preset).state for fit in fits]
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[0].items():
            torch.testing.assert_close(
                states[1][name].cpu(), tensor.cpu(), rtol=1e-5, atol=1e-6, msg=f"{preset} {name}"
            )
