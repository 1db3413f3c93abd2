"""Memory of caches, against caches stored in full."""

from __future__ import annotations

import pytest

from esm_turbo import TurboConfig, TurboEsm
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import Evaluation, protocols
from esm_turbo.evaluate.memory import measure_memory
from tests.helpers.evaluation import SEQUENCES, cache_of, ids_of


def test_memory_equals_that_of_a_real_cache(tiny: TurboEsm, evaluation: Evaluation) -> None:
    residues = ("".join(SEQUENCES) * 30)[:1022]
    geometry = tiny.model.esm.codec(TurboConfig.from_preset("exact")).geometry
    elements = 1024 * geometry.elements_per_token
    for preset in ("exact", "paper"):
        memory = evaluation[preset].memory
        cache = cache_of(tiny, ids_of(tiny, residues), preset)
        assert cache.get_seq_length() == memory.tokens == 1024
        assert memory.nbytes == cache.nbytes
        assert memory.bits_per_element == cache.bits_per_element == 8 * memory.nbytes / elements
        assert memory.ratio_to_fp32 == pytest.approx(32 / memory.bits_per_element)
        assert memory.ratio_to_fp16 == pytest.approx(16 / memory.bits_per_element)
    # Three bits and a sign per element, one byte per token for its id, eight for the length.
    assert evaluation["paper"].memory.nbytes == elements // 2 + 1024 + 8
    state = tiny.model.esm.codec(PRESETS["paper"]).state
    assert evaluation["paper"].memory.calibration_nbytes == sum(4 * tensor.numel() for tensor in state.values()) > 0
    assert evaluation["exact"].memory.calibration_nbytes == 0


def test_memory_of_other_lengths(tiny: TurboEsm) -> None:
    protein = protocols.Protein("it", SEQUENCES[0])
    short, long = (measure_memory(tiny, [protein], [PRESETS["paper"]], tokens)[0] for tokens in (64, 128))
    assert (short.tokens, long.tokens) == (64, 128)
    assert long.nbytes - 8 == 2 * (short.nbytes - 8)
