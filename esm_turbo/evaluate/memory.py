"""Memory of caches, measured on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING

import torch

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.evaluate.protocols import Protein
from esm_turbo.evaluate.results import Memory

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

MEMORY_TOKENS = 1024


@torch.no_grad()
def measure_memory(
    turbo: ContextModel, proteins: Sequence[Protein], configs: Sequence[TurboConfig], tokens: int = MEMORY_TOKENS
) -> list[Memory]:
    """Store one protein of `tokens` tokens with every preset and count the bytes.

    Args:
        turbo: the model with its calibration.
        proteins: their residues, repeated as needed, make up the protein.
        configs: the presets.
        tokens: `<cls>` and `<eos>` included, at least 3.
    """
    residues = cycle(chain.from_iterable(turbo.codes.encode(p.sequence, p.name) for p in proteins))
    input_ids = torch.tensor([[turbo.codes.cls, *islice(residues, tokens - 2), turbo.codes.eos]])
    _, caches = prefill(turbo.model, configs, input_ids, torch.ones_like(input_ids))
    elements = Geometry.of(turbo.model.config).elements_per_token * tokens
    return [
        Memory(
            tokens,
            nbytes := caches[config].nbytes,
            caches[config].bits_per_element,
            ratio_to_fp32=4 * elements / nbytes,
            ratio_to_fp16=2 * elements / nbytes,
            calibration_nbytes=sum(
                t.numel() * t.element_size() for t in turbo.model.base_model.codec(config).state.values()
            ),
        )
        for config in configs
    ]
