"""The arms `full`, `frozen` and `turbo`, and the forwards that scoring and variant effects share.

An arm is one way to compute a score. `full` runs the whole input for every mask. `frozen` extends a context cached at
full precision. `turbo` extends a context cached under the model's preset. Frozen against full is the freezing error,
turbo against frozen the quantisation error.

Each task decides which of its `refresh` residues of a cached context run again with the new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device
from esm_turbo.config import DEFAULT_TOKS_PER_BATCH, TurboConfig
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.heads import check_head, check_reads_on
from esm_turbo.model.memory import available_bytes
from esm_turbo.model.plain import check_unhooked
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.proteins.tokens import TokenIds
from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.context_sources import ContextSource
from esm_turbo.tasks.common.memory import cache_bytes, check_memory
from esm_turbo.tasks.common.options import Arm

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

ARMS: tuple[Arm, ...] = get_args(Arm)
FROZEN = TurboConfig.from_preset("exact")
"""Storage of the arm `frozen`."""

# Measured on the embedded model: larger batches no longer fit into a CPU's caches.
_CPU_TOKENS, _DEVICE_TOKENS = 1024, 32768
# Tokens from which reading a context is faster once it is decoded, by type of device: on an H200 as measured, on a CPU
# about where decoding (a tenth of a prefill) is earned back. Others may lack what decoding needs.
_DECODED_FROM = {"cpu": 256, "cuda": 3072}
# Largest part of the free memory that a decoded context may take; batches need the rest.
_DECODED_SHARE = 0.25
# In the full arm each row is a whole protein; smaller batches would hold so few rows that launch overhead dominates.
_CPU_FULL_TOKENS = 4096
# On an H200, batches of 16,384 embed 1.1 times as fast as those of 4,096 (with caches, 1.3), see docs/performance.md.
_CUDA_PROTEIN_TOKENS = 16384


def resolve_arm(
    turbo: ContextModel, arm: str | None, cache: TurboKVCache | None = None, *, reads_on: bool = True
) -> tuple[Arm, str | None]:
    """Decide which arm runs.

    Args:
        arm: the requested arm; None is the arm of `cache`, or else `default_arm`.
        cache: the context, if the caller has one; its preset fixes the arm.
        reads_on: whether the task continues contexts, which then must be begins of proteins, not whole homologs.

    Returns:
        The arm, and the preset that its context is stored as; None for `full`.

    Raises:
        ValueError: no such arm exists, `cache` belongs to another one or to another model, or the model's language
            model head was never trained, or the family does not support scores.
    """
    check_head(turbo.model, "lm_head")
    if reads_on:
        check_reads_on(turbo.model.base_model, "scores of candidates")
    if cache is not None:
        own: Arm = "frozen" if cache.config == FROZEN else "turbo"
        if arm not in (None, own):
            raise ValueError(f"a cache of preset {cache.config.name!r} is for arm {own!r}, not {arm!r}")
        turbo.model.bind_cache(cache)
        return own, cache.config.name
    turbo.model.refresh_fingerprint()
    chosen = check_choice("arm", default_arm(turbo) if arm is None else arm, ARMS)
    return chosen, arm_preset(turbo, chosen)


def default_arm(turbo: ContextModel) -> Arm:
    """The arm that runs if none is named: `turbo`, or `frozen` for a model without a calibration.

    Both score equally fast, see `maybe_decode`, and about as accurately. A preset that was chosen is kept.
    """
    return "frozen" if turbo.calibration is None and not turbo.model.base_model.preset_chosen else "turbo"


def default_config(turbo: ContextModel) -> TurboConfig:
    """The options under which contexts are stored if no arm is named: not those of a preset that nobody has chosen."""
    return context_config(turbo, default_arm(turbo))


def default_storage(turbo: ContextModel) -> AbstractContextManager[None]:
    """Within the block, contexts are stored as `default_config` says, in this thread."""
    storing: AbstractContextManager[None] = turbo.model.base_model.kv.storing_as(default_config(turbo))
    return storing


def should_decode(turbo: ContextModel, config: TurboConfig, tokens: float) -> bool:
    """Whether a context that is stored under these options, and that so many tokens read, is read faster decoded."""
    threshold = _DECODED_FROM.get(turbo.model.device.type)
    return threshold is not None and tokens >= threshold and config != FROZEN


def maybe_decode(turbo: ContextModel, cache: TurboKVCache, tokens: int) -> TurboKVCache:
    """A context for many tokens that read it: decoded to full precision if that pays and memory permits.

    Args:
        cache: of any rows.
        tokens: number of tokens that will read it, in all batches together.
    """
    encoder = turbo.model.base_model
    # Contexts of a pool are there to be read as they are stored.
    if isinstance(cache, PooledContexts) or not should_decode(turbo, cache.config, tokens / cache.batch_size):
        return cache
    free = available_bytes(encoder.device)
    stored = cache.batch_size * cache.columns
    if free is not None and cache_bytes(encoder, stored, FROZEN) > _DECODED_SHARE * free:
        return cache
    decoded: TurboKVCache = encoder.decoded(cache)
    return decoded


def arm_preset(turbo: ContextModel, arm: Arm, caches: Iterable[TurboKVCache | None] = ()) -> str | None:
    """The preset that the contexts of an arm are stored as, or given `caches`; None for `full`, which stores none."""
    if arm == "full":
        return None
    return next((cache.config for cache in caches if cache is not None), context_config(turbo, arm)).name


def batch_tokens(toks_per_batch: int | None, arm: str, device: torch.device) -> int:
    """Number of tokens per batch: the requested one, or a fast one for the arm and device.

    Raises:
        ValueError: the requested number is not positive.
    """
    if toks_per_batch is None:
        if device.type != "cpu":
            return _DEVICE_TOKENS
        return _CPU_FULL_TOKENS if arm == "full" else _CPU_TOKENS
    check_count("toks_per_batch", toks_per_batch)
    return toks_per_batch


def protein_tokens(toks_per_batch: int | None, turbo: ContextModel, devices: str | None = None) -> int:
    """Padded tokens per batch of whole proteins, to embed or store them or to generate from them.

    It depends on the kind of device alone, so that whoever shares a run forms the same batches.

    Args:
        toks_per_batch: the requested number; None is 16,384 on CUDA devices and 4,096 on others.
        turbo: the model.
        devices: what the batches run on, see `Runner.devices`; None is the model's own device. Where they are of
            several kinds, the smaller number fits all of them.

    Raises:
        ValueError: the requested number is not positive.
    """
    if toks_per_batch is not None:
        check_count("toks_per_batch", toks_per_batch)
        return toks_per_batch
    return _CUDA_PROTEIN_TOKENS if runs_on_cuda(turbo, devices) else DEFAULT_TOKS_PER_BATCH


def runs_on_cuda(turbo: ContextModel, devices: str | None) -> bool:
    """Whether all devices are of CUDA, see `protein_tokens`."""
    names = str(turbo.model.device) if devices is None else devices
    return all(name.startswith("cuda") for name in names.split())


def prefill_ids(
    turbo: ContextModel, token_ids: Sequence[int], arm: str, store: ContextSource | None = None
) -> TurboKVCache:
    """Compute one row of tokens exactly, without adding or dropping any, and cache it as the arm requires.

    Args:
        token_ids: the row.
        arm: `frozen` or `turbo`.
        store: looked into before the row is computed, and added to.

    Raises:
        ValueError: the preset needs a calibration and the model has none, or the store belongs to another model.
        NotEnoughMemoryError: the row does not fit into the device's memory.
    """
    config = context_config(turbo, arm)
    if store is None:
        return prefill_rows(turbo, [token_ids], config)
    return store.get_or_compute(turbo, token_ids, config, lambda: prefill_rows(turbo, [token_ids], config))


def context_config(turbo: ContextModel, arm: str) -> TurboConfig:
    """The options under which the arm `frozen` or `turbo` stores contexts."""
    return FROZEN if arm == "frozen" else turbo.model.base_model.turbo_config


@torch.no_grad()
def prefill_rows(turbo: ContextModel, rows: Sequence[TokenIds], config: TurboConfig) -> TurboKVCache:
    """Compute rows of tokens exactly, in one batch, and cache them under these options; nothing waits for the device.

    Residues that contexts leave out keep their positions, see `TokenCodes.present`.

    Raises:
        NotEnoughMemoryError: they do not fit into the device's memory.
    """
    rows, positions = turbo.codes.present(rows)
    esm, lengths = turbo.model.base_model, [len(row) for row in rows]
    cache: TurboKVCache = esm.kv.cache_within_call(config)
    more = cache_bytes(esm, max(lengths) * len(rows), config)
    check_memory(esm, max(lengths), rows=len(rows), more=more)
    input_ids, mask = turbo.codes.batch(rows)
    places = None if positions is None else turbo.codes.batch(positions)[0]
    esm(input_ids, mask if len(rows) > 1 else None, places, past_key_values=cache, use_cache=True, row_lengths=lengths)
    return cache


def single_row(cache: TurboKVCache, role: str) -> list[int]:
    """Token ids of a cache that must have one row.

    Args:
        cache: the cache.
        role: its role in the error message, such as `a target`.

    Raises:
        ValueError: it has no row, or several, or several chains.
    """
    if cache.batch_size != 1:
        raise ValueError(f"{role} must be a cache of one row, this one has {cache.batch_size}: see `cache.select`")
    if cache.chains is not None:
        # Residues that run again would see all of them.
        raise ValueError(f"{role} cannot be a cache of several chains: use `model` with `sequence_id`")
    ids: list[int] = cache.token_ids[0, : cache.get_seq_length()].tolist()
    return ids


@torch.no_grad()
def log_probabilities(turbo: ContextModel, input_ids: Tensor, at: Tensor, **options: Any) -> Tensor:
    """Predicted log-probabilities at one or several tokens of every row.

    Args:
        input_ids: [batch, n].
        at: index of the token in each row, int64 [batch]; or of k tokens, [batch, k].
        **options: further arguments of `CachedModel.forward`.

    Returns:
        Natural logarithms of probabilities over the vocabulary, float32 [batch, vocab_size] or
        [batch, k, vocab_size], on the CPU.

    Raises:
        ValueError: the model has code that would be left out, see `check_unhooked`.
    """
    check_unhooked(turbo.model)
    if not options:
        # Without a cache and padding, the encoder may run the rows packed.
        options = {"row_lengths": [input_ids.shape[1]] * len(input_ids)}
    states = turbo.model.base_model(input_ids, **options).last_hidden_state
    rows = torch.arange(len(at), device=states.device).view(-1, *[1] * (at.dim() - 1))
    # The language model head runs on the selected tokens only.
    logits = turbo.model.lm_head(states[rows, to_device(at, states.device)])
    log_probs: Tensor = logits.float().log_softmax(dim=-1).cpu()
    return log_probs
