"""Inputs of the evaluation's tests, and slow computations of its figures, one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from esm_turbo import TurboConfig, TurboEsm
from esm_turbo.evaluate import Accuracy

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMWDELKNPVYACCTI", "FVNQHLCGSHLVEALYLVCGERGFFYTPKT", "MA"]
CLASSES = ["mainly_alpha", "mainly_beta", "mainly_alpha", None]
OFF: dict[str, Any] = {"extend_ks": ()}


def ids_of(turbo: TurboEsm, sequence: str) -> Tensor:
    return torch.tensor([[turbo.codes.cls, *turbo.codes.encode(sequence, "it"), turbo.codes.eos]])


@torch.no_grad()
def cache_of(turbo: TurboEsm, ids: Tensor, preset: str) -> Any:
    """The cache that a forward pass with `use_cache=True` writes with a preset."""
    esm = turbo.model.esm
    own, esm.turbo_config = esm.turbo_config, TurboConfig.from_preset(preset)
    try:
        return turbo.model(ids, use_cache=True).past_key_values
    finally:
        esm.turbo_config = own


def check(accuracy: Accuracy, reference: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    """Compare figures with those computed in PyTorch from (hidden state, logits) of single tokens."""
    hidden, logits = (torch.stack(x).double() for x in zip(*reference, strict=True))
    other_hidden, other_logits = (torch.stack(x).double() for x in zip(*other, strict=True))
    cosine = F.cosine_similarity(hidden, other_hidden, dim=-1)
    kl = F.kl_div(other_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    expected = {
        "tokens": len(hidden),
        "cosine_mean": cosine.mean(),
        "cosine_q01": cosine.quantile(0.01),
        "cosine_min": cosine.min(),
        "kl_mean": kl.mean(),
        "kl_q99": kl.quantile(0.99),
        "top1_agreement": (logits.argmax(-1) == other_logits.argmax(-1)).double().mean(),
        "relative_rms_error": (other_hidden - hidden).norm() / hidden.norm(),
    }
    # Forward passes in float32 of other shapes round their sums differently.
    for name, value in expected.items():
        assert getattr(accuracy, name) == pytest.approx(float(value), rel=1e-4, abs=2e-6), name
