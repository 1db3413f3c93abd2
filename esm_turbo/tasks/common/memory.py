"""How much memory a forward takes, and whether there is as much: said before it begins, not by a killed process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from esm_turbo.config import Geometry

if TYPE_CHECKING:
    from transformers import EsmConfig

    from esm_turbo.modeling_esm_turbo import TurboEsmModel

# Tensors of one layer that live together at its widest place: the activation function holds this many of the
# feed-forward network's inner size, and residual stream, norm and its input are of the hidden size.
_INNER, _HIDDEN = 4, 4


class NotEnoughMemoryError(MemoryError):
    """An input needs more memory than the device has."""


def forward_bytes(config: EsmConfig, tokens: int, itemsize: int, *, eager: bool = False, batch_size: int = 1) -> int:
    """Estimates what a forward holds at once beyond the weights, without output of all layers.

    Args:
        config: of the model.
        tokens: of all rows together.
        itemsize: bytes of the model's dtype.
        eager: the attention holds all its scores, as with `attn_implementation="eager"`.
        batch_size: rows of the same length.
    """
    activations = tokens * (_INNER * config.intermediate_size + _HIDDEN * config.hidden_size)
    scores = 2 * config.num_attention_heads * tokens * tokens // batch_size if eager else 0
    total: int = itemsize * (activations + scores)
    return total


def cache_bytes(geometry: Geometry, tokens: int, bits: float) -> int:
    """Bytes of keys and values of so many tokens at so many bits an element."""
    return round(geometry.elements_per_token * tokens * bits / 8)


def check_memory(model: TurboEsmModel, tokens: int, *, stored: bool) -> None:
    """Makes sure that a single row of tokens can be computed.

    Args:
        model: what runs.
        tokens: of the row.
        stored: whether a cache is written.

    Raises:
        NotEnoughMemoryError: the estimate is more than what is free; names both.
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
            " take a shorter protein, a smaller model or a larger machine"
        )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch keeps what it once had.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return _available_in_system() if device.type == "cpu" else None


def _available_in_system() -> int | None:
    """Linux: what the kernel counts as available, or what the control group has left."""
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
        # File pages that are not in use are given up first.
        reclaimable = sum(int(size) for name, size in entries if name == "inactive_file")
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + reclaimable


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
