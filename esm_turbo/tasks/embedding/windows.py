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
from typing import TYPE_CHECKING, Any

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


@torch.no_grad()
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
    codes, encoder, last = turbo.codes, turbo.model.base_model, turbo.model.config.num_hidden_layers
    ids = torch.from_numpy(np.array(residues, dtype=np.int64)).to(turbo.model.device)
    # Token dropout is that of the whole protein.
    counts = torch.tensor([len(residues) + 2]), torch.tensor([list(residues).count(codes.mask)])
    cache: TurboKVCache | None = encoder.kv.cache_within_call(encoder.turbo_config) if windows.memory else None
    spans, kept = windows.spans(len(residues)), windows.kept(len(residues))
    for (start, end), following, (first, stop) in zip(spans, [*spans[1:], None], kept, strict=True):
        # The residues before the next window are cached.
        stored = 0 if following is None else following[0] - start
        ends = [codes.eos] if end == len(ids) else []
        input_ids = torch.cat((ids.new_tensor([codes.cls]), ids[start:end], ids.new_tensor(ends)))[None]
        options: dict[str, object] = {"token_counts": counts, "output_hidden_states": set(layers) != {last}}
        if cache is not None and cache.batch_size:
            options |= _memory_options(cache, windows.memory, input_ids, stored)
        elif cache is not None and stored:
            options |= {"past_key_values": cache, "use_cache": True}
        output = encoder(input_ids, **options)
        if cache is not None and stored:
            if start == 0:
                cache.crop(1 + stored)
            # No later window attends to these; one column before the memory stays, for the position of <cls>.
            unreachable = max(cache.get_seq_length() - windows.memory - 1, 0)
            cache.drop_front(unreachable // cache.front_step * cache.front_step)
        states = states_of(output, last)
        own = {layer: states[layer][0] for layer in layers}
        inner = slice(1 + first - start, 1 + stop - start)
        yield first, {layer: x[inner] for layer, x in own.items()}, {layer: x[0] for layer, x in own.items()}


def states_of(output: Any, last: int) -> dict[int, Tensor]:
    """Hidden states of an encoder's output by layer: of all, or of the last if there are no others.

    Args:
        output: the output.
        last: number of layers that the model should have.

    Raises:
        ValueError: it has others, so that layers would be taken for those of other numbers.
    """
    if output.hidden_states is None:
        return {last: output.last_hidden_state}
    if len(output.hidden_states) != last + 1:
        raise ValueError(
            f"the model has {len(output.hidden_states) - 1} layers, and num_hidden_layers in its configuration is"
            f" {last}; set it to the number of layers"
        )
    return dict(enumerate(output.hidden_states))


def _memory_options(cache: TurboKVCache, memory: int, input_ids: Tensor, stored: int) -> dict[str, object]:
    """Arguments of a forward of `<cls>` and residues that attends to the memory and caches the first residues.

    Args:
        cache: holds the memory.
        memory: number of residues, see `Windows`.
        input_ids: `<cls>` and the residues, [1, n].
        stored: number of residues to cache.
    """
    columns, n = cache.get_seq_length(), input_ids.shape[1]
    visible = min(memory, columns - 1)
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
            sums[layer] += part[turbo.codes.residues_among(residues[first : first + len(part)])].sum(dim=0)
            if per_tok:
                per_tok[layer][first : first + len(part)] = part
        bos = bos or {layer: x.to("cpu", torch.float32, copy=True) for layer, x in cls_states.items()}
    parts = {}
    if "per_tok" in include:
        parts["representations"] = per_tok
    if "mean" in include:
        count = len(residues) - list(residues).count(turbo.codes.chain_break)
        parts["mean_representations"] = {layer: x / count for layer, x in sums.items()}
    if "bos" in include:
        parts["bos_representations"] = bos
    return parts
