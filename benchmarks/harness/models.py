"""Models to measure: the geometries of published checkpoints with random weights, and their calibrations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer, PreTrainedModel

from benchmarks.harness.environment import device_name
from esm_turbo import Calibration, KVCalibrator, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRODUCT_PRESETS, Geometry
from esm_turbo.proteins.fasta import STANDARD_RESIDUES

_CLS, _FIRST_RESIDUE, _LAST_RESIDUE, _EOS = 0, 4, 23, 2


@dataclass(frozen=True)
class Architecture:
    """Sizes of an ESM-2 model, by default those of 650M.

    Attributes:
        name: of the model in records.
        num_layers: number of transformer layers.
        num_heads: attention heads per layer.
        head_dim: components per head.
        intermediate_size: width of the feed-forward network.
    """

    name: str
    num_layers: int = 33
    num_heads: int = 20
    head_dim: int = 64
    intermediate_size: int = 5120

    def described(self) -> dict[str, int]:
        """Sizes as recorded."""
        return {"layers": self.num_layers, "heads": self.num_heads, "head_dim": self.head_dim}

    def config(self) -> EsmConfig:
        """Configuration like those of the published checkpoints."""
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


def described(model: PreTrainedModel) -> dict[str, Any]:
    """Sizes, dtype and device of a model as recorded."""
    geometry = Geometry.of(model.config)
    return {
        "layers": geometry.num_layers,
        "heads": geometry.num_heads,
        "head_dim": geometry.head_dim,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "device_name": device_name(model.device),
    }


def random_tokens(rows: int, residues: int, *, cls: bool = True, eos: bool = False, seed: int = 0) -> Tensor:
    """Token ids of random proteins, [rows, residues + special tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_RESIDUE, _LAST_RESIDUE + 1, (rows, residues), generator=generator)
    before = ids.new_full((rows, 1 if cls else 0), _CLS)
    after = ids.new_full((rows, 1 if eos else 0), _EOS)
    return torch.cat([before, ids, after], dim=1)


def random_sequences(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Random proteins of standard residues."""
    generator = torch.Generator().manual_seed(seed)
    picks = (torch.randint(len(STANDARD_RESIDUES), (n,), generator=generator) for n in lengths)
    return ["".join(STANDARD_RESIDUES[int(i)] for i in pick) for pick in picks]


@torch.no_grad()
def masked_lm(architecture: Architecture, device: str = "cpu", seed: int = 0) -> EsmForMaskedLM:
    """A model of random weights, float32: as the library initialises it, but for larger queries and keys."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = EsmForMaskedLM(architecture.config()).eval()
    for layer in model.esm.encoder.layer:
        # With the default initialisation attention is nearly a plain mean, which would hide errors.
        layer.attention.self.query.weight *= 2
        layer.attention.self.key.weight *= 2
    return model


def turbo_of(model: EsmForMaskedLM, calibration: Calibration | None = None, preset: str = "exact") -> TurboEsm:
    """A `TurboEsm` with the same weights."""
    tokenizer = EsmTokenizer.from_pretrained(EMBEDDED_MODEL)
    return TurboEsm(TurboEsmForMaskedLM.from_esm(model, calibration=calibration, preset=preset), tokenizer)


def random_models(
    architecture: Architecture, preset: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[EsmForMaskedLM, TurboEsm]:
    """A model of random weights, and one that shares them, with a calibration on random proteins for one preset."""
    model = masked_lm(architecture, device)
    turbo = turbo_of(model, random_calibration(model.esm, [preset]), preset)
    turbo.model.to(device, dtype)
    return model, turbo


def random_turbo(
    architecture: Architecture, preset: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TurboEsm:
    """The second of `random_models`."""
    return random_models(architecture, preset, device, dtype)[1]


def random_calibration(model: Any, presets: Iterable[str] = PRODUCT_PRESETS) -> Calibration:
    """A calibration on a few random proteins; its caches take as long to read as those of a real one."""
    calibrator = KVCalibrator(model, sample_size=256)
    calibrator.partial_fit(random_tokens(4, 128, eos=True, seed=1))
    return calibrator.finalize(presets)
