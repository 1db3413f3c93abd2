"""Small models of random weights, their calibrations, and random proteins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM, PreTrainedModel

from esm_turbo import Calibration, KVCalibrator
from esm_turbo.config import DEFAULT_PRESET, TurboConfig

ESMC_MINI, E1_MINI = (Path(__file__).parents[2] / "models" / name for name in ("esmc-mini", "e1-mini"))
"""Small trained models."""
MASK, CLS, PAD, EOS = 32, 0, 1, 2
FIRST_RESIDUE, LAST_RESIDUE = 4, 23

CACHE_CONFIGS = {
    "exact": TurboConfig.from_preset("exact"),
    "compressed": TurboConfig.from_preset("paper"),
    "protected": replace(TurboConfig.from_preset(DEFAULT_PRESET), protect_special_tokens=True),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_config(*, head_dim: int = 16, heads: int = 4, layers: int = 2, **config: object) -> EsmConfig:
    """A published ESM-2 configuration with other sizes."""
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


def rounding(config: EsmConfig) -> float:
    """How far a model's float32 states may be from exact ones, relative to their size.

    However n products are summed, the sum is within about sqrt(n) 2^-24 of their size (Higham and Mary, SIAM J. Sci.
    Comput. 41:A2815, 2019); the errors of all layers add up. Two runs may be twice as far apart.
    """
    return float(config.num_hidden_layers * config.intermediate_size**0.5 * 2.0**-24)


def assert_same_states(one: Tensor, other: Tensor, config: EsmConfig) -> None:
    """States or logits of two float32 runs: apart by rounding, absolute below 1 and relative above."""
    assert one.shape == other.shape
    assert ((one - other).abs() <= 2 * rounding(config) * other.abs().clamp_min(1)).all()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square error relative to the root mean square."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def assert_same_output(ours: object, theirs: Mapping[str, Any]) -> None:
    """Bit for bit, in all that an output of Hugging Face's holds."""
    for name in theirs:
        mine, other = getattr(ours, name), theirs[name]
        if isinstance(other, tuple):
            assert len(mine) == len(other)
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), name
        else:
            assert torch.equal(mine, other), name


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """To a dtype, with rotary frequencies in float32 as those of a loaded checkpoint."""
    encoder = model.base_model
    rotary = encoder.rotary_emb if hasattr(encoder, "rotary_emb") else encoder.rotary_embeddings
    frequencies = rotary.inv_freq.float()
    model = model.to(dtype)
    rotary.inv_freq = frequencies
    return model


def make_esm(*, seed: int = 0, attn_implementation: str = "sdpa", **config: object) -> EsmForMaskedLM:
    """Hugging Face's model with random weights, large enough for attention to be far from uniform."""
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


def make_esmc(
    *,
    head_dim: int = 16,
    heads: int = 4,
    layers: int = 2,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    **config: object,
) -> PreTrainedModel:
    """As `make_esm`, of the ESM-C architecture."""
    from transformers import EsmcConfig, EsmcForMaskedLM

    sizes = {
        "hidden_size": head_dim * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
    }
    model = EsmcForMaskedLM._from_config(EsmcConfig(**(sizes | config)), attn_implementation=attn_implementation).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm" in name:
                parameter.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
            elif parameter.dim() == 1:
                parameter.mul_(0.1)
            elif "embed_tokens" not in name:
                parameter.mul_(1.2 * parameter.shape[1] ** -0.5)
    return model


def make_calibration(model: PreTrainedModel, residues: int = 512) -> Calibration:
    """A calibration on random residues."""
    calibrator = KVCalibrator(model, sample_size=256)
    calibrator.partial_fit(random_ids([residues // 4] * 4, seed=7)[0])
    # Each test fits only the presets it uses.
    return calibrator.finalize(presets=[])


def random_ids(
    lengths: list[int], *, seed: int = 0, masks: int = 0, cls: bool = True, eos: bool = False
) -> tuple[Tensor, Tensor]:
    """Random proteins as `input_ids` and `attention_mask` [batch, longest], padded on the right.

    Args:
        lengths: tokens per row, including special tokens.
        seed: seed of the residues.
        masks: number of residues per row that are `<mask>`.
        cls: whether rows begin with `<cls>`.
        eos: whether rows end with `<eos>`.
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
