"""Exact forward passes that fill caches of several presets at once, and model outputs as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.metrics import Array, Outputs
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.sequences import number_sequences
from esm_turbo.model.sessions import KVSession, Prefill

if TYPE_CHECKING:
    from esm_turbo.model.masked_lm import CachedMaskedLM, TurboMaskedLMOutput


class _PrefillEach(KVSession):
    """Passes the keys and values of one forward pass to several prefills."""

    def __init__(self, prefills: Sequence[Prefill]) -> None:
        self.prefills = prefills

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        for prefill in self.prefills:
            prefill.attend(layer_idx, query, keys, values)


def prefill(
    model: CachedMaskedLM,
    configs: Sequence[TurboConfig],
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
) -> tuple[TurboMaskedLMOutput, dict[TurboConfig, TurboKVCache]]:
    """Run one exact forward pass and write a cache of each preset from it.

    Args:
        model: the model; its own preset does not matter.
        configs: the presets.
        input_ids: [batch, n], on the CPU.
        attention_mask: [batch, n], padded on the right.
        position_ids: [batch, n]; None for 0, 1, 2, ...

    Returns:
        The output, with all hidden states, and a cache for each of `configs`.

    Raises:
        ValueError: a preset needs a calibration, and the model has none.
    """
    esm, device = model.base_model, model.device
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    places = None if position_ids is None else position_ids.to(device)
    chains = None
    if esm.exact_contexts is not None:
        chains = number_sequences(input_ids, esm.special_ids[0])
    prefills = []
    for config in dict.fromkeys(configs):
        cache = esm.kv.cache_within_call(config)
        append = cache.plan_append(input_ids, attention_mask != 0, places, esm.protected_ids, chains)
        prefills.append(Prefill(cache, append, model.kv_backend))
    output = model(input_ids, attention_mask, places, kv_session=_PrefillEach(prefills), output_hidden_states=True)
    for one in prefills:
        one.cache.commit(one.append)
    return output, {one.cache.config: one.cache for one in prefills}


def as_outputs(output: TurboMaskedLMOutput, row: int | slice, tokens: int | slice, layers: bool = False) -> Outputs:
    """Part of a model output: tokens of one row, or one token of every row."""
    return Outputs(
        to_float64(output.hidden_states[-1][row, tokens]),
        to_float64(output.logits[row, tokens]),
        np.stack([_to_float32(states[row, tokens]) for states in output.hidden_states[1:]]) if layers else None,
    )


def to_float64(x: Tensor) -> Array:
    """A tensor of any device and floating dtype as a NumPy array."""
    return _to_float32(x).astype(np.float64)


def _to_float32(x: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = x.detach().to("cpu", torch.float32).numpy()
    return array
