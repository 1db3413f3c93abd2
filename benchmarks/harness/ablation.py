"""The paper's ablation (arXiv:2603.26110, table 7) and further variants of its method."""

from __future__ import annotations

from dataclasses import replace

from esm_turbo.config import TurboConfig

_PAPER = TurboConfig.from_preset("paper")

PAPER_ABLATION: dict[str, TurboConfig] = {
    "full": _PAPER,
    "no sign": replace(_PAPER, sign_correction="none"),
    "shared LUT": replace(_PAPER, shared_codebook=True),
    "no rotation": replace(_PAPER, key_transform="identity"),
    "no rotation, no sign": replace(_PAPER, key_transform="identity", sign_correction="none"),
    "random Hadamard": replace(_PAPER, key_transform="hadamard"),
    "standardised": replace(_PAPER, standardize=True),
    "signs on keys only": replace(_PAPER, sign_correction="keys"),
    "protected tokens": replace(_PAPER, protect_special_tokens=True),
    "16 levels, no sign": replace(_PAPER, bits=4, sign_correction="none"),
    "4 levels": replace(_PAPER, bits=2),
}
"""Options by name. The first five are the paper's table 7; the last two use as many bits as the first two."""

PAPER_TABLE_7: dict[str, float] = {
    "full": 0.9639,
    "no sign": 0.950,
    "shared LUT": 0.952,
    "no rotation": 0.780,
    "no rotation, no sign": 0.740,
}
"""Figures of the paper: decode cosine similarity, ESM-2 650M, haemoglobin alpha, final hidden states (table 7)."""
