"""One forward pass that fills several caches, and outputs as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRESETS
from esm_turbo.evaluate.contexts import as_outputs, prefill
from tests.helpers.evaluation import SEQUENCES, cache_of, ids_of

CONFIGS = [PRESETS["exact"], PRESETS["paper"], PRESETS["turbo2"], PRESETS["paper"]]


def test_caches_equal_those_of_one_prefill_each(tiny: TurboEsm) -> None:
    ids = ids_of(tiny, SEQUENCES[0])
    output, caches = prefill(tiny.model, CONFIGS, ids, torch.ones_like(ids))
    assert list(caches) == CONFIGS[:3]
    for config, cache in caches.items():
        expected = cache_of(tiny, ids, config)
        assert cache.nbytes == expected.nbytes
        tensors = dict(expected.named_tensors())
        assert all(torch.equal(tensor, tensors.pop(name)) for name, tensor in cache.named_tensors())
        assert not tensors
    with torch.no_grad():
        plain = tiny.model(ids, output_hidden_states=True)
    assert torch.equal(output.logits, plain.logits)
    assert len(output.hidden_states) == 3


def test_a_preset_without_its_calibration_is_refused(tiny_model: Any) -> None:
    bare: TurboEsmForMaskedLM = tiny_model(preset="exact")
    ids = torch.tensor([[0, 5, 6, 2]])
    with pytest.raises(ValueError, match="needs a calibration of this model"):
        prefill(bare, [TurboConfig.from_preset("paper")], ids, torch.ones_like(ids))


def test_outputs_are_parts_of_the_forward_pass(tiny: TurboEsm) -> None:
    ids = ids_of(tiny, SEQUENCES[1])
    output, _ = prefill(tiny.model, [], ids, torch.ones_like(ids))
    found = as_outputs(output, 0, slice(2, 5), layers=True)
    assert found.hidden.dtype == found.logits.dtype == np.float64
    np.testing.assert_array_equal(found.hidden, output.hidden_states[-1][0, 2:5].detach().numpy())
    np.testing.assert_array_equal(found.logits, output.logits[0, 2:5].detach().numpy())
    assert found.layers is not None and found.layers.shape == (2, 3, 64)
    np.testing.assert_array_equal(found.layers[1], found.hidden.astype(np.float32))
    one = as_outputs(output, slice(None), 3)
    assert one.layers is None
    np.testing.assert_array_equal(one.hidden[0], found.hidden[1])
