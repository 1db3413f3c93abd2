"""Memory estimates of a forward, checked before it starts so that a run fails with an error and is not killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from esm_turbo.config import Geometry

if TYPE_CHECKING:
    from transformers import EsmConfig

    from esm_turbo.modeling_esm_turbo import TurboEsmModel

# Tensors of one layer alive at its peak, in the feed-forward network's activation: this many of the intermediate size,
# and this many of the hidden size (residual stream, norm and its input).
_INNER, _HIDDEN = 4, 4


class NotEnoughMemoryError(MemoryError):
    """An input needs more memory than the device has free."""


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


def cache_bytes(geometry: Geometry, tokens: int, bits: float) -> int:
    """Bytes of the keys and values of `tokens` tokens at `bits` bits per element."""
    return round(geometry.elements_per_token * tokens * bits / 8)


def check_memory(model: TurboEsmModel, tokens: int, *, stored: bool) -> None:
    """Check that a single row of tokens fits into memory.

    Args:
        model: the encoder.
        tokens: number of tokens in the row.
        stored: whether a cache is written.

    Raises:
        NotEnoughMemoryError: the estimate exceeds the free memory; the message names both.
    """
    free = available_bytes(model.device)
    if free is None:
        return
    itemsize = model.dtype.itemsize
    needed = forward_bytes(model.config, tokens, itemsize, eager=model.config._attn_implementation == "eager")
    if stored:
        options = model.turbo_config
        bits = {"exact": 8.0 * itemsize, "turbo": options.mean_bits}.get(options.codec, 8.0)
        needed += cache_bytes(Geometry.of(model.config), tokens, bits)
    if needed > free:
        raise NotEnoughMemoryError(
            f"{tokens:,} tokens at once need about {_text(needed)} of memory, {_text(free)} are free on {model.device};"
            " use a shorter protein, a smaller model or a larger machine"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch holds on to freed memory for reuse.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return _available_in_system() if device.type == "cpu" else None


def _available_in_system() -> int | None:
    """Linux: the kernel's estimate of available memory, or what the control group has left if that is less."""
    found = [_meminfo(), _control_group()]
    return min((size for size in found if size is not None), default=None)


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        entries = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        # Inactive file pages are reclaimed first.
        reclaimable = sum(int(size) for name, size in entries if name == "inactive_file")
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + reclaimable


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
