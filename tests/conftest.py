"""Fixtures that all tests share: the embedded model, and small models of random weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

# Before transformers is imported: no test but those marked `network` may look for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM

from esm_turbo import Calibration, KVCalibrator, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import DEFAULT_PRESET, TurboConfig

MASK, CLS, PAD, EOS = 32, 0, 1, 2
FIRST_RESIDUE, LAST_RESIDUE = 4, 23

# Results must not depend on the machine's cores, and several workers share them.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def turbo() -> TurboEsm:
    """The embedded model with its shipped calibration, float32 on the CPU. Do not change it: all tests share it."""
    return TurboEsm.from_pretrained(device="cpu")


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


def make_config(*, head_dim: int = 16, heads: int = 4, layers: int = 2, **config: object) -> EsmConfig:
    """An ESM-2 configuration, as published but for its sizes."""
    options: dict[str, object] = {
        "vocab_size": 33,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "hidden_size": head_dim * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "max_position_embeddings": 1026,
        "position_embedding_type": "rotary",
        "layer_norm_eps": 1e-5,
        "emb_layer_norm_before": False,
        "token_dropout": True,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "use_cache": True,
    }
    return EsmConfig(**(options | config))


def make_esm(*, seed: int = 0, attn_implementation: str = "sdpa", **config: object) -> EsmForMaskedLM:
    """Hugging Face's model with weights large enough that attention is far from uniform, all of them random."""
    with torch.device("meta"):
        model = EsmForMaskedLM._from_config(make_config(**config), attn_implementation=attn_implementation)
    rotary = type(model.esm.rotary_embeddings)(model.config)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "LayerNorm" in name or "layer_norm" in name:
                parameter.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
            elif parameter.dim() == 1:
                parameter.mul_(0.1)
            elif "word_embeddings" in name:
                parameter.mul_(0.5)
            else:
                parameter.mul_(1.2 * parameter.shape[1] ** -0.5)
    model.esm.rotary_embeddings.inv_freq = rotary.inv_freq
    model.esm.embeddings.position_ids = torch.arange(model.config.max_position_embeddings)[None]
    return model


def make_calibration(model: EsmForMaskedLM, residues: int = 512) -> Calibration:
    """A calibration on random residues."""
    calibrator = KVCalibrator(model, sample_size=256)
    calibrator.partial_fit(random_ids([residues // 4] * 4, seed=7)[0])
    # Each test fits the presets that it uses.
    return calibrator.finalize(presets=[])


def random_ids(
    lengths: list[int], *, seed: int = 0, masks: int = 0, cls: bool = True, eos: bool = False
) -> tuple[Tensor, Tensor]:
    """Random proteins as `input_ids` and `attention_mask` [batch, longest], padded on the right.

    Args:
        lengths: of each row, special tokens included.
        seed: of the residues.
        masks: how many residues of each row are `<mask>`.
        cls: begin with `<cls>`.
        eos: end with `<eos>`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(FIRST_RESIDUE, LAST_RESIDUE + 1, shape, generator=generator)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, length in enumerate(lengths):
        inner = torch.arange(int(cls), length - int(eos))
        ids[row, inner[torch.randperm(len(inner), generator=generator)[:masks]]] = MASK
        if cls:
            ids[row, 0] = CLS
        if eos:
            ids[row, length - 1] = EOS
        ids[row, length:] = PAD
        attention_mask[row, :length] = 1
    return ids, attention_mask


@pytest.fixture(scope="session")
def random_proteins() -> Callable[..., tuple[Tensor, Tensor]]:
    """`random_proteins([12, 7], seed=0, masks=0, cls=True, eos=False)`: `input_ids` and `attention_mask`."""
    return random_ids


CACHE_CONFIGS = {
    "exact": TurboConfig.from_preset("exact"),
    "compressed": TurboConfig.from_preset("paper"),
    "protected": replace(TurboConfig.from_preset(DEFAULT_PRESET), protect_special_tokens=True),
}


@pytest.fixture(params=CACHE_CONFIGS)
def cache_config(request: pytest.FixtureRequest) -> TurboConfig:
    """Options of the kinds of caches there are: exact, compressed, and compressed with special tokens apart."""
    return CACHE_CONFIGS[request.param]
