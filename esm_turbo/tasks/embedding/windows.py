"""Long proteins, window by window, in memory that does not grow with their length.

A window after the first attends to the compressed keys and values of the last residues before it, and those were
computed while attending to the ones before them, so that what a residue sees reaches further back than the memory (the
recurrence of Transformer-XL, Dai et al. 2019, arXiv:1901.02860, here over a compressed cache). Of what a full run
would show, a window lacks the residues after its end and what lies before the memory.

Consecutive windows overlap. What is stored of a window is what the next one does not begin with, so every stored
residue was computed with at least `overlap` residues after it.

Every window begins with `<cls>`, computed anew at the position before the first residue in sight, because the model
turns much of its attention to it; `<eos>` stands only where the protein ends.
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

if TYPE_CHECKING:
    import numpy.typing as npt

    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache

    Ids = Sequence[int] | npt.NDArray[np.uint8]

_OVERLAP = 64
# Larger windows with the same memory would let residues see further apart than the model was trained on.
_WINDOW = TRAINED_RESIDUES // 2


@dataclass(frozen=True)
class Windows:
    """How long proteins are cut.

    Attributes:
        window: residues of a window; proteins of up to this many are computed whole.
        overlap: residues that a window shares with the one before it.
        memory: residues before a window that it sees through the cache; 0 computes every window by itself.

    Raises:
        ValueError: a number is out of its range.
    """

    window: int
    overlap: int
    memory: int

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("overlap", 0), ("memory", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if self.overlap >= self.window:
            raise ValueError(f"`overlap` must be smaller than `window` ({self.window}), got {self.overlap}")

    @classmethod
    def of(cls, window: int | None, overlap: int | None = None, memory: int | None = None) -> Windows | None:
        """What was asked for, with defaults for the rest; None where nothing was.

        Args:
            window: residues of a window; None with one of the others is 511, half of what ESM-2 was trained on.
            overlap: None is 64, or a quarter of a window below 256.
            memory: None is as many as `window`.

        Raises:
            ValueError: a number is out of its range.
        """
        if window is None and overlap is None and memory is None:
            return None
        window = _WINDOW if window is None else window
        # A window that is no integer is refused below.
        whole = window if type(window) is int else 0
        return cls(
            window, min(_OVERLAP, whole // 4) if overlap is None else overlap, whole if memory is None else memory
        )

    @property
    def sight(self) -> int:
        """Residues between the first that a window sees and its last."""
        return self.window + self.memory

    def cuts(self, length: int) -> bool:
        """Whether a protein of so many residues is cut."""
        return length > self.window

    def spans(self, length: int) -> list[tuple[int, int]]:
        """First residue and one past the last of every window of a protein.

        All have `window` residues; so that the last has them too, they are spread evenly and overlap by `overlap` at
        least.
        """
        room = max(length - self.window, 0)
        steps = -(-room // (self.window - self.overlap))
        starts = [index * room // steps for index in range(steps + 1)] if steps else [0]
        return [(start, min(start + self.window, length)) for start in starts]

    def kept(self, length: int) -> list[tuple[int, int]]:
        """Residues whose result is taken from each window, first and one past the last: together each one once.

        With a memory the later of two windows has more around the residues that both have: all before them through the
        cache, and more after them. Without one each has the half that is further from its edge.
        """
        spans = self.spans(length)
        turns = [0]
        for (_, end), (start, _) in pairwise(spans):
            turns.append(start if self.memory else (start + end) // 2)
        return list(zip(turns, [*turns[1:], length], strict=True))


def iter_windows(
    turbo: ContextModel, residues: Ids, windows: Windows, layers: Sequence[int]
) -> Iterator[tuple[int, dict[int, Tensor], dict[int, Tensor]]]:
    """Hidden states of a protein, window by window.

    Args:
        turbo: the model.
        residues: token ids without `<cls>` and `<eos>`, a list or a NumPy array.
        windows: how it is cut.
        layers: whose hidden states are taken, from 0 to the number of layers.

    Yields:
        For every window the first residue whose result it gives, by layer the hidden states of these residues
        [n, hidden_size], and by layer that of the window's `<cls>` [hidden_size]; on the model's device.

    Raises:
        ValueError: a memory is asked for under a preset that needs a calibration, and there is none.
    """
    run = _WindowRun(turbo, residues, windows, layers)
    spans, kept = windows.spans(len(residues)), windows.kept(len(residues))
    for number, ((start, end), (first, stop)) in enumerate(zip(spans, kept, strict=True)):
        following = spans[number + 1][0] if number + 1 < len(spans) else None
        states = run.window(start, end, following)
        inner = slice(1 + first - start, 1 + stop - start)
        yield first, {k: x[inner] for k, x in states.items()}, {k: x[0] for k, x in states.items()}


class _WindowRun:
    """One protein on its way: its windows in turn, and the cache of what lies before the next one."""

    def __init__(self, turbo: ContextModel, residues: Ids, windows: Windows, layers: Sequence[int]) -> None:
        self.turbo = turbo
        self.windows = windows
        self.layers = layers
        self.ids = torch.from_numpy(np.array(residues, dtype=np.int64)).to(turbo.model.device)
        tokens = torch.tensor([len(residues) + 2], device=self.ids.device)
        # Token dropout as if the protein were computed whole.
        self.counts = (tokens, (self.ids == turbo.codes.mask).sum()[None])
        self.cache: TurboKVCache | None = turbo.model.new_cache() if windows.memory else None

    @torch.no_grad()
    def window(self, start: int, end: int, following: int | None) -> dict[int, Tensor]:
        """Hidden states by layer [1 + n, hidden_size], of `<cls>` first.

        Args:
            start: the first residue.
            end: one past the last.
            following: the first residue of the next window; None for none.
        """
        codes = self.turbo.codes
        ends = [codes.eos] if end == len(self.ids) else []
        parts = (self.ids.new_tensor([codes.cls]), self.ids[start:end], self.ids.new_tensor(ends))
        input_ids = torch.cat(parts)[None]
        last = self.turbo.model.config.num_hidden_layers
        options = {"token_counts": self.counts, "output_hidden_states": set(self.layers) != {last}}
        if self.cache is not None and self.cache.batch_size:
            options |= self._behind(input_ids, 0 if following is None else following - start)
        elif self.cache is not None and following is not None:
            options |= {"past_key_values": self.cache, "use_cache": True}
        output = self.turbo.model.esm(input_ids, **options)
        if self.cache is not None and following is not None:
            if start == 0:
                self.cache.crop(1 + following)
            self._forget()
        states = output.hidden_states or {last: output.last_hidden_state}
        return {layer: states[layer][0, : 1 + end - start] for layer in self.layers}

    def _behind(self, input_ids: Tensor, stored: int) -> dict[str, object]:
        """What makes a forward of `<cls>` and residues see the memory before them, and store the first residues."""
        cache = self.cache
        assert cache is not None
        columns, n = cache.get_seq_length(), input_ids.shape[1]
        in_sight = min(self.windows.memory, columns - 1)
        # Out of sight with the rest: <cls> as it was, or the residue in whose place the new <cls> stands.
        attention_mask = input_ids.new_ones(1, columns + n)
        attention_mask[:, : columns - in_sight] = 0
        position_ids = cache.next_positions[:, None] + torch.arange(-1, n - 1, device=input_ids.device)
        position_ids[:, 0] -= in_sight
        steps = torch.arange(n, device=input_ids.device)
        return {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": stored > 0,
            "append_mask": ((steps > 0) & (steps <= stored))[None],
        }

    def _forget(self) -> None:
        """Drops what no later window sees; one column before the memory stays, for the place of `<cls>`."""
        assert self.cache is not None
        spare = self.cache.get_seq_length() - self.windows.memory - 1
        step = self.cache.front_step
        self.cache.drop_front(max(spare, 0) // step * step)


def embed_in_windows(
    turbo: ContextModel, residues: Ids, windows: Windows, layers: Sequence[int], include: frozenset[str]
) -> dict[str, dict[int, Tensor]]:
    """What `ContextModel.embed` gives of one long protein, by the names of `ProteinEmbedding`.

    Args:
        turbo: the model.
        residues: token ids without `<cls>` and `<eos>`, a list or a NumPy array.
        windows: how it is cut.
        layers: whose hidden states are taken.
        include: some of `mean`, `per_tok` and `bos`, the last of the first window.

    Returns:
        float32 tensors on the CPU: besides `representations`, nothing grows with the protein.
    """
    size = turbo.model.config.hidden_size
    per_tok = {layer: torch.empty(len(residues), size) for layer in layers} if "per_tok" in include else {}
    sums = {layer: torch.zeros(size) for layer in layers}
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
