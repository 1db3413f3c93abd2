"""Errors of stored keys, values and scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.accuracy.components import ROTATIONS, StoredErrors, preset_cases, rotation_cases
from benchmarks.harness.embedded import embedded
from esm_turbo.config import PRESETS


def errors_of(preset: str, layers: list) -> dict:
    errors = StoredErrors.of(embedded().model.base_model.codec(PRESETS[preset]))
    errors.add(layers)
    return errors.figures()


@pytest.fixture
def gaussian() -> list:
    config, generator = embedded().model.config, torch.Generator().manual_seed(0)
    shape = 3, 1, config.num_attention_heads, 50, config.hidden_size // config.num_attention_heads
    return [tuple(torch.randn(shape, generator=generator)) for _ in range(config.num_hidden_layers)]


def test_more_bits_have_smaller_errors_and_an_8_bit_code_about_6_db_a_bit(gaussian: list) -> None:
    four, eight = errors_of("int4", gaussian), errors_of("int8", gaussian)
    for kind in ("key", "value", "score"):
        assert 20 < eight["snr_db"][kind] - four["snr_db"][kind] < 28
    assert four["recall"]["1"] < eight["recall"]["1"] <= 1


def test_the_kurtosis_of_gaussian_components_is_zero(gaussian: list) -> None:
    found = errors_of("int8", gaussian)
    assert abs(found["kurtosis"]["channels"]) < 0.05
    assert found["draws"] == 48 * np.prod(gaussian[0][0].shape[1:2]) * len(gaussian)


def test_rows_name_their_model_and_preset() -> None:
    [case] = [case for case in preset_cases(max_proteins=1) if case.name == "turbo1"]
    [row] = case.measure(1)
    assert row["preset"] == "turbo1" and row["residues"]["tokens"] > 0
    assert sum(one["tokens"] for one in row["by_residue"].values()) == row["residues"]["tokens"]
    names = [case.name for case in rotation_cases()]
    assert names[:2] == ["no outliers", "keys x10"] and names[-1] == "keys and values x60"
    assert len(ROTATIONS) == 6
