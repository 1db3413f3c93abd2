"""The three ways in which a score can be computed, and the steps that they share.

`full` computes everything anew, `frozen` extends a context kept at full precision, and `turbo` one stored as the
model's preset says. The difference between the first two is the freezing error, between the last two the
quantisation error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.files.fingerprint import model_fingerprint
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.tasks.common.memory import check_memory
from esm_turbo.tasks.common.options import Arm

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

ARMS: tuple[Arm, ...] = get_args(Arm)
FROZEN = TurboConfig.from_preset("exact")

# Measured on a processor and the embedded model: more tokens at once fall out of its caches.
_CPU_TOKENS, _DEVICE_TOKENS = 1024, 32768
# A whole protein a row: so few rows that starting operations would be what takes the time.
_CPU_FULL_TOKENS = 4096


def check_arm(arm: str) -> Arm:
    """The arm of that name.

    Raises:
        ValueError: there is none.
    """
    for known in ARMS:
        if arm == known:
            return known
    raise ValueError(f"`arm` must be one of {list(ARMS)}, got {arm!r}")


def arm_of(cache: TurboKVCache) -> Arm:
    """The arm that a given cache makes."""
    return "frozen" if cache.config == FROZEN else "turbo"


def batch_tokens(toks_per_batch: int | None, arm: str, device: torch.device) -> int:
    """Tokens of a batch: what was asked for, or what is fast.

    Raises:
        ValueError: it is not positive.
    """
    if toks_per_batch is None:
        if device.type != "cpu":
            return _DEVICE_TOKENS
        return _CPU_FULL_TOKENS if arm == "full" else _CPU_TOKENS
    if toks_per_batch < 1:
        raise ValueError(f"`toks_per_batch` must be at least 1, got {toks_per_batch}")
    return toks_per_batch


@torch.no_grad()
def prefill_ids(turbo: ContextModel, token_ids: Sequence[int], arm: str) -> TurboKVCache:
    """Computes one row of tokens exactly, as they are, and stores it as the arm says.

    Raises:
        ValueError: the model lacks the calibration that its preset needs.
        NotEnoughMemoryError: the device has too little memory.
    """
    esm = turbo.model.esm
    config = FROZEN if arm == "frozen" else esm.turbo_config
    geometry = Geometry.of(esm.config)
    cache = TurboKVCache(config, geometry, model_fingerprint(esm), esm.codec(config), esm.device)
    check_memory(esm, len(token_ids), stored=True)
    input_ids = torch.tensor([list(token_ids)], device=esm.device)
    esm(input_ids, past_key_values=cache, use_cache=True, row_lengths=[len(token_ids)])
    return cache


@torch.no_grad()
def log_probabilities(turbo: ContextModel, input_ids: Tensor, at: Tensor, **options: Any) -> Tensor:
    """What the model predicts for one or several tokens of every row.

    Args:
        turbo: the model.
        input_ids: [batch, n].
        at: which token of each row, int64 [batch]; or which tokens, [batch, k].
        **options: as of `TurboEsmModel.forward`.

    Returns:
        Natural logarithms of probabilities over the vocabulary, float32 [batch, vocab_size] or
        [batch, k, vocab_size], on the CPU.
    """
    device = turbo.model.device
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    if not options:
        options = {"row_lengths": [input_ids.shape[1]] * len(input_ids)}
    states = turbo.model.esm(input_ids.to(device), **options).last_hidden_state
    rows = torch.arange(len(at), device=states.device).view(-1, *[1] * (at.dim() - 1))
    # The head runs on the tokens that are asked for, not on all.
    logits = turbo.model.lm_head(states[rows, at.to(states.device)])
    found: Tensor = logits.float().log_softmax(dim=-1).cpu()
    return found
