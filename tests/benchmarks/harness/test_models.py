"""Models of random weights, and random proteins."""

from __future__ import annotations

import torch

from benchmarks.harness.models import (
    EsmcArchitecture,
    masked_lm,
    random_calibration,
    random_model,
    random_sequences,
    random_tokens,
    random_turbo,
    with_presets,
)
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from tests.helpers.benchmark_cases import TINY


def test_shapes_of_rows_on_a_device() -> None:
    sizes = {"layers": 2, "heads": 2, "head_dim": 32, "device": "cuda"}
    assert TINY.on_device(tokens=3) == {"batch_size": 1, "dtype": "bfloat16", "tokens": 3, **sizes}
    assert TINY.on_device(batch_size=4, dtype="float32") == {"batch_size": 4, "dtype": "float32", **sizes}


def test_random_models_follow_the_seed() -> None:
    first, second, other = (random_model(TINY, seed).encoder.layer[1].attention.self.key.weight for seed in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_models_of_esmc() -> None:
    architecture = EsmcArchitecture("tiny", num_layers=2, num_heads=2, head_dim=32, intermediate_size=64)
    first, second = (random_model(architecture) for _ in range(2))
    ids = random_tokens(1, 20, eos=True)
    with torch.no_grad():
        assert torch.equal(first(ids).last_hidden_state, second(ids).last_hidden_state)
    assert random_calibration(first, []).geometry.model_type == "esmc"


def test_a_head_has_the_encoder_under_it() -> None:
    model = masked_lm(TINY)
    ids = random_tokens(2, 5, eos=True)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        states = model.esm(ids).last_hidden_state
    assert len(model.esm.encoder.layer) == model.config.num_hidden_layers == 2
    assert torch.equal(output.hidden_states[-1], states)
    assert output.logits.shape == (2, 7, 33)
    assert model.lm_head.decoder.weight is model.esm.embeddings.word_embeddings.weight


def test_a_random_turbo_writes_its_preset() -> None:
    turbo = random_turbo(TINY, "turbo2")
    assert turbo.prefill("MKTAYIAK").config.name == "turbo2"


def test_models_of_all_presets_share_their_weights() -> None:
    turbo = random_turbo(TINY, "turbo3")
    models = with_presets(turbo.model.esm, turbo.calibration)
    assert list(models) == list(PRODUCT_PRESETS)
    weights = {model.embeddings.word_embeddings.weight.data_ptr() for model in models.values()}
    assert weights == {turbo.model.esm.embeddings.word_embeddings.weight.data_ptr()}


def test_random_proteins() -> None:
    ids = random_tokens(3, 4, eos=True, seed=1)
    assert ids.shape == (3, 6)
    assert (ids[:, 0] == 0).all() and (ids[:, -1] == 2).all() and ((ids[:, 1:-1] >= 4) & (ids[:, 1:-1] <= 23)).all()
    sequences = random_sequences([3, 5], seed=2)
    assert [len(sequence) for sequence in sequences] == [3, 5]
    assert set("".join(sequences)) <= set(STANDARD_RESIDUES)
    assert random_sequences([3, 5], seed=2) == sequences != random_sequences([3, 5], seed=3)
