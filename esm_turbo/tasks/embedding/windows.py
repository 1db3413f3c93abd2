"""Long proteins, window by window, in memory that does not grow with their length.

Each window after the first attends to the compressed keys and values of the last residues before it, the memory. These
were computed while attending to the residues before them, so information reaches further back than the memory (the
recurrence of Transformer-XL, Dai et al. 2019, arXiv:1901.02860, here over a compressed cache). Compared with a run of
the whole protein, a window does not see the residues after its end, nor, directly, those before the memory.

Consecutive windows overlap. The cached part of a window ends where the next window begins, so every cached residue was
computed with at least `overlap` residues after it.

Every window begins with `<cls>`, since the model attends to it strongly. It is computed again for each window, at the
position before the first visible residue. `<eos>` appears only at the end of the protein.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from esm_turbo.proteins.limits import TRAINED_RESIDUES
from esm_turbo.proteins.tokens import TokenIds
from esm_turbo.tasks.common.checks import check_count

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache

_OVERLAP = 64
# With larger windows and as much memory, residues would attend further than the model was trained to.
_WINDOW = TRAINED_RESIDUES // 2


@dataclass(frozen=True)
class Windows:
    """The split of long proteins into windows.

    Attributes:
        window: residues per window; proteins of up to this length are computed whole.
        overlap: residues that a window shares with the one before it.
        memory: residues before a window that it attends to through the cache; 0 computes each window independently.

    Raises:
        ValueError: a number is out of range.
    """

    window: int
    overlap: int
    memory: int

    def __post_init__(self) -> None:
        for name, minimum in (("window", 1), ("overlap", 0), ("memory", 0)):
            check_count(name, getattr(self, name), minimum)
        if self.overlap >= self.window:
            raise ValueError(f"`overlap` must be smaller than `window` ({self.window}), got {self.overlap}")

    @classmethod
    def of(cls, window: int | None, overlap: int | None = None, memory: int | None = None) -> Windows | None:
        """Windows of the given sizes, with defaults for those that are None; None if all are.

        Args:
            window: residues per window; the default is 511, half the length that ESM-2 was trained on.
            overlap: the default is 64, or a quarter of the window if that is less.
            memory: the default is `window`.

        Raises:
            ValueError: a number is out of range.
        """
        if window is None and overlap is None and memory is None:
            return None
        window = _WINDOW if window is None else window
        # The constructor refuses a window that is not an integer.
        whole = window if type(window) is int else 0
        return cls(
            window, min(_OVERLAP, whole // 4) if overlap is None else overlap, whole if memory is None else memory
        )

    @property
    def reach(self) -> int:
        """Number of residues from the first that a window attends to through its last."""
        return self.window + self.memory

    def splits(self, length: int) -> bool:
        """Whether a protein of `length` residues is split."""
        return length > self.window

    def spans(self, length: int) -> list[tuple[int, int]]:
        """First residue and one past the last of each window of a protein.

        All windows have `window` residues. They are spread evenly, so that the last one does too, and overlap by at
        least `overlap`.
        """
        room = max(length - self.window, 0)
        steps = -(-room // (self.window - self.overlap))
        starts = [index * room // steps for index in range(steps + 1)] if steps else [0]
        return [(start, min(start + self.window, length)) for start in starts]

    def kept(self, length: int) -> list[tuple[int, int]]:
        """Residues whose results come from each window, first and one past the last. Each residue appears once.

        With a memory, the later of two windows gives the residues that both have: it sees those before them through
        the cache, and more after them. Without a memory, each window gives the half that is further from its edge.
        """
        spans = self.spans(length)
        begins = [0]
        for (_, end), (start, _) in pairwise(spans):
            begins.append(start if self.memory else (start + end) // 2)
        return list(zip(begins, [*begins[1:], length], strict=True))


def iter_windows(
    turbo: ContextModel, residues: TokenIds, windows: Windows, layers: Sequence[int]
) -> Iterator[tuple[int, dict[int, Tensor], dict[int, Tensor]]]:
    """Compute the hidden states of a protein window by window.

    Args:
        residues: token ids without `<cls>` and `<eos>`.
        windows: the split into windows.
        layers: layers whose hidden states are returned, from 0 to the number of layers.

    Yields:
        For each window, the first residue whose results it gives; by layer, the hidden states of these residues,
        [n, hidden_size]; and by layer, that of the window's `<cls>`, [hidden_size]. On the model's device.

    Raises:
        ValueError: the windows have a memory, and the preset needs a calibration that the model lacks.
    """
    run = _WindowRun(turbo, residues, windows, layers)
    spans, kept = windows.spans(len(residues)), windows.kept(len(residues))
    for number, ((start, end), (first, stop)) in enumerate(zip(spans, kept, strict=True)):
        next_start = spans[number + 1][0] if number + 1 < len(spans) else None
        states = run.window(start, end, next_start)
        inner = slice(1 + first - start, 1 + stop - start)
        yield first, {k: x[inner] for k, x in states.items()}, {k: x[0] for k, x in states.items()}


class _WindowRun:
    """The windows of one protein, run one after the other, and the cache of the residues before the next one."""

    def __init__(self, turbo: ContextModel, residues: TokenIds, windows: Windows, layers: Sequence[int]) -> None:
        self.turbo = turbo
        self.windows = windows
        self.layers = layers
        self.ids = torch.from_numpy(np.array(residues, dtype=np.int64)).to(turbo.model.device)
        tokens = torch.tensor([len(residues) + 2], device=self.ids.device)
        # Token dropout is that of the whole protein.
        self.counts = (tokens, (self.ids == turbo.codes.mask).sum()[None])
        encoder = turbo.model.base_model
        self.cache: TurboKVCache | None = encoder.kv.cache_within_call(encoder.turbo_config) if windows.memory else None

    @torch.no_grad()
    def window(self, start: int, end: int, next_start: int | None) -> dict[int, Tensor]:
        """Run the next window and cache the residues before the one after it.

        Args:
            start: the first residue.
            end: one past the last residue.
            next_start: the first residue of the next window; None for the last window.

        Returns:
            By layer, the hidden states of `<cls>` and the residues, [1 + n, hidden_size].
        """
        codes = self.turbo.codes
        ends = [codes.eos] if end == len(self.ids) else []
        parts = (self.ids.new_tensor([codes.cls]), self.ids[start:end], self.ids.new_tensor(ends))
        input_ids = torch.cat(parts)[None]
        last = self.turbo.model.config.num_hidden_layers
        options = {"token_counts": self.counts, "output_hidden_states": set(self.layers) != {last}}
        if self.cache is not None and self.cache.batch_size:
            options |= self._memory_options(input_ids, 0 if next_start is None else next_start - start)
        elif self.cache is not None and next_start is not None:
            options |= {"past_key_values": self.cache, "use_cache": True}
        output = self.turbo.model.base_model(input_ids, **options)
        if self.cache is not None and next_start is not None:
            if start == 0:
                self.cache.crop(1 + next_start)
            self._drop_unreachable()
        states = output.hidden_states or {last: output.last_hidden_state}
        return {layer: states[layer][0, : 1 + end - start] for layer in self.layers}

    def _memory_options(self, input_ids: Tensor, stored: int) -> dict[str, object]:
        """Arguments of a forward of `<cls>` and residues that attends to the memory and caches the first residues.

        Args:
            input_ids: `<cls>` and the residues, [1, n].
            stored: number of residues to cache.
        """
        cache = self.cache
        assert cache is not None
        columns, n = cache.get_seq_length(), input_ids.shape[1]
        visible = min(self.windows.memory, columns - 1)
        # The last hidden column is the cached <cls>, or the residue whose position the new <cls> takes.
        attention_mask = input_ids.new_ones(1, columns + n)
        attention_mask[:, : columns - visible] = 0
        position_ids = cache.next_positions[:, None] + torch.arange(-1, n - 1, device=input_ids.device)
        position_ids[:, 0] -= visible
        steps = torch.arange(n, device=input_ids.device)
        return {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": stored > 0,
            "append_mask": ((steps > 0) & (steps <= stored))[None],
        }

    def _drop_unreachable(self) -> None:
        """Drop columns that no later window attends to, but keep one before the memory, for the position of `<cls>`."""
        assert self.cache is not None
        spare = self.cache.get_seq_length() - self.windows.memory - 1
        step = self.cache.front_step
        self.cache.drop_front(max(spare, 0) // step * step)


def embed_in_windows(
    turbo: ContextModel, residues: TokenIds, windows: Windows, layers: Sequence[int], include: frozenset[str]
) -> dict[str, dict[int, Tensor]]:
    """Embed one long protein.

    Args:
        residues: token ids without `<cls>` and `<eos>`.
        windows: the split into windows.
        layers: layers whose hidden states are used.
        include: some of `mean`, `per_tok` and `bos`; the last comes from the first window.

    Returns:
        Fields of `ProteinEmbedding`, float32 tensors on the CPU. Only `representations` grows with the protein.
    """
    size = turbo.model.config.hidden_size
    per_tok = (
        {layer: torch.empty(len(residues), size, dtype=torch.float32) for layer in layers}
        if "per_tok" in include
        else {}
    )
    sums = {layer: torch.zeros(size, dtype=torch.float32) for layer in layers}
    bos: dict[int, Tensor] = {}
    for first, states, cls_states in iter_windows(turbo, residues, windows, layers):
        for layer, x in states.items():
            part = x.to("cpu", torch.float32)
            sums[layer] += part.sum(dim=0)
            if per_tok:
                per_tok[layer][first : first + len(part)] = part
        bos = bos or {layer: x.to("cpu", torch.float32, copy=True) for layer, x in cls_states.items()}
    parts = {}
    if "per_tok" in include:
        parts["representations"] = per_tok
    if "mean" in include:
        parts["mean_representations"] = {layer: x / len(residues) for layer, x in sums.items()}
    if "bos" in include:
        parts["bos_representations"] = bos
    return parts
