"""Memory estimates of a forward, checked before it starts so that a run fails with an error and is not killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from esm_turbo.config import Geometry, TurboConfig
from esm_turbo.model.memory import NotEnoughMemoryError, available_bytes, is_out_of_memory

if TYPE_CHECKING:
    from transformers import EsmConfig

    from esm_turbo.model.cached_model import CachedModel

_Result = TypeVar("_Result")

# Tensors of one layer alive at its peak, in the feed-forward network's activation: this many of the intermediate size
# (the library computes it in four, this package in two), and this many of the hidden size (residual stream, norm and
# its input).
_INNER, _HIDDEN = 3, 4


def forward_bytes(config: EsmConfig, tokens: int, itemsize: int, *, eager: bool = False, batch_size: int = 1) -> int:
    """Estimate the peak memory of a forward in bytes, without the weights and without outputs of all layers.

    Args:
        config: the model's configuration.
        tokens: number of tokens in all rows together.
        itemsize: bytes per element of the model's dtype.
        eager: whether attention materialises all its scores, as with `attn_implementation="eager"`.
        batch_size: number of rows, all of the same length.
    """
    activations = tokens * (_INNER * config.intermediate_size + _HIDDEN * config.hidden_size)
    scores = 2 * config.num_attention_heads * tokens * tokens // batch_size if eager else 0
    total: int = itemsize * (activations + scores)
    return total


def cache_bytes(model: CachedModel, tokens: int, config: TurboConfig | None = None) -> int:
    """Estimate the bytes of the keys and values of `tokens` tokens under a preset; None is the model's own."""
    options = config or model.turbo_config
    bits = {"exact": 8.0 * model.dtype.itemsize, "turbo": options.mean_bits}.get(options.codec, 8.0)
    total: int = round(Geometry.of(model.config).elements_per_token * tokens * bits / 8)
    return total


def check_memory(model: CachedModel, tokens: int, *, rows: int = 1, more: int = 0) -> None:
    """Check that a forward fits into memory.

    Args:
        model: the encoder.
        tokens: number of tokens in each row.
        rows: number of rows.
        more: bytes that are needed besides, such as those of a cache or of outputs.

    Raises:
        NotEnoughMemoryError: the estimate exceeds the free memory; the message names both.
    """
    free = available_bytes(model.device)
    if free is None:
        return
    eager, total = model.config._attn_implementation == "eager", rows * tokens
    needed = more + forward_bytes(model.config, total, model.dtype.itemsize, eager=eager, batch_size=rows)
    if needed > free:
        raise NotEnoughMemoryError(
            f"{total:,} tokens at once need about {size_text(needed)} of memory, {size_text(free)} are free on"
            f" {model.device}; use fewer tokens, a smaller model or a larger machine"
        )


def halve_until_it_fits(
    run: Callable[[Sequence[int]], _Result], batch: Sequence[int], on_failure: Callable[[int, Exception], None]
) -> list[_Result]:
    """Run a batch; if it does not fit into memory, run its halves, and so on.

    Args:
        run: runs the items of these indices.
        batch: indices of the items.
        on_failure: called with an item that does not fit alone, and the error.

    Returns:
        The results of the parts that fit, in the order of the batch.
    """
    try:
        return [run(batch)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The error holds the frames of the failed run, and these its tensors.
        failure = error.with_traceback(None)
        failure.__context__ = failure.__cause__ = None
    if len(batch) == 1:
        on_failure(batch[0], failure)
        return []
    middle = len(batch) // 2
    return [part for half in (batch[:middle], batch[middle:]) for part in halve_until_it_fits(run, half, on_failure)]


def too_large(residues: int, device: torch.device, error: Exception | None = None) -> str:
    """The reason why a protein failed that does not fit into memory; that of the estimate, if this is the error."""
    if isinstance(error, NotEnoughMemoryError):
        return str(error)
    return (
        f"its {residues} residues need more memory than {device} has;"
        " cut it, request less, or use a device with more memory"
    )


def size_text(count: int) -> str:
    """A number of bytes, such as `1.5 GiB` or `20 MiB`."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
