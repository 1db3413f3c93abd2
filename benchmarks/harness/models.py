"""Models to measure: the geometry of published checkpoints with random weights, and calibrations of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EsmConfig, EsmModel

from esm_turbo import Calibration, KVCalibrator, TurboEsmModel
from esm_turbo.config import PRODUCT_PRESETS

_CLS, _FIRST_RESIDUE, _LAST_RESIDUE, _EOS = 0, 4, 23, 2


@dataclass(frozen=True)
class Architecture:
    """Sizes of an ESM-2 model; those of 650M unless they say otherwise.

    Attributes:
        name: what to call it.
        num_layers: transformer layers.
        num_heads: attention heads.
        head_dim: components of a head.
        intermediate_size: of the feed-forward network.
    """

    name: str
    num_layers: int = 33
    num_heads: int = 20
    head_dim: int = 64
    intermediate_size: int = 5120

    def described(self) -> dict[str, int]:
        """What records say of it."""
        return {"layers": self.num_layers, "heads": self.num_heads, "head_dim": self.head_dim}

    def config(self) -> EsmConfig:
        """As in the published configurations."""
        return EsmConfig(
            vocab_size=33,
            pad_token_id=1,
            eos_token_id=_EOS,
            mask_token_id=32,
            hidden_size=self.num_heads * self.head_dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=1026,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )


def random_model(architecture: Architecture, seed: int = 0, device: str = "cpu") -> EsmModel:
    """A model of random weights, float32."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = EsmModel(architecture.config(), add_pooling_layer=False).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:
            # As they are initialised, attention is all but a plain mean, in which errors would hide.
            layer.attention.self.query.weight *= 2
            layer.attention.self.key.weight *= 2
    return model


def random_tokens(rows: int, residues: int, *, cls: bool = True, eos: bool = False, seed: int = 0) -> Tensor:
    """Ids of random proteins, [rows, residues and special tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_RESIDUE, _LAST_RESIDUE + 1, (rows, residues), generator=generator)
    before = ids.new_full((rows, 1 if cls else 0), _CLS)
    after = ids.new_full((rows, 1 if eos else 0), _EOS)
    return torch.cat([before, ids, after], dim=1)


def random_calibration(model: EsmModel) -> Calibration:
    """Fitted to a few random proteins: as dear to read as a real one."""
    calibrator = KVCalibrator(model, sample_size=256)
    calibrator.partial_fit(random_tokens(4, 128, eos=True, seed=1))
    return calibrator.finalize()


def with_presets(model: EsmModel, calibration: Calibration, **turbo: Any) -> dict[str, TurboEsmModel]:
    """One model per preset, all with the weights of `model`."""
    return {
        preset: TurboEsmModel.from_esm(model, calibration=calibration, preset=preset, **turbo)
        for preset in PRODUCT_PRESETS
    }
