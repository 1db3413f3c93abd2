"""Contexts that lie in the slots of larger caches, as one batch that extensions read where they lie."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.kv.append import Append
from esm_turbo.kv.tensors import OWN_TENSORS, Axis, axis_of, entry_bytes
from esm_turbo.kv_cache import TurboKVCache

__all__ = ["Hold", "PooledContexts", "Segment"]

_IN_PLACE = "contexts in a pool are read in place: {} needs a cache of its own, as of `ContextStore.get_or_prefill`"


class Hold(Protocol):
    """Keeps contexts from eviction."""

    @property
    def released(self) -> bool:
        """True once the slots may hold other contexts."""

    def release(self) -> None:
        """Lets go of the slots."""


class Segment(NamedTuple):
    """Rows of an extension that read contexts of one slab.

    Attributes:
        slab: the slab.
        lengths: of the contexts in all of its slots, as these rows read them, int64 [slots].
        slots: of each row.
        rows: which rows.
    """

    slab: TurboKVCache
    lengths: Tensor
    slots: RowIndex
    rows: slice


class PooledContexts(TurboKVCache):
    """A batch of contexts in the slots of slabs: caches of many rows, of which some are these contexts.

    Extensions take it as `past_key_values`, and rows may name its contexts. It has lengths and tokens of its own, so
    that it can be cropped, rows of one context alike, and rows selected, without a change of what lies in the slots.
    Nothing can be appended.
    """

    slabs: Sequence[TurboKVCache] = ()
    places: npt.NDArray[np.int64] = np.zeros((0, 2), dtype=np.int64)
    hold: Hold | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, slabs: Sequence[TurboKVCache], places: Sequence[tuple[int, int]], hold: Hold | None = None) -> Self:
        """The contexts at some places.

        Args:
            slabs: claimed by one model, with as many slots of protected tokens.
            places: slab and row of each context.
            hold: keeps them there.

        Raises:
            ValueError: there is none, or one is of another model or preset than the first.
        """
        if not len(places):
            raise ValueError("there must be at least one context")
        where = np.array(places, dtype=np.int64).reshape(-1, 2)
        numbers, rows = np.unique(where[:, 0], return_index=True)
        for number, row in zip(numbers, rows, strict=True):
            slabs[where[0, 0]].check_alike(slabs[number], int(row))
        order = np.lexsort((where[:, 1], where[:, 0]))
        parts = []
        for number in numbers:
            slab, slots = slabs[number], where[order][where[order][:, 0] == number, 1]
            at = torch.from_numpy(slots).to(slab.device)
            own = {name: tensor[at] for name, tensor in slab.named_tensors() if name in OWN_TENSORS}
            assert slab.codec is not None
            part = cls.from_tensors(slab.config, slab.geometry, slab.identity, slab.codec, own)
            parts.append(part)
        made = cls.cat(parts)
        made.slabs, made.places, made.hold = slabs, where[order], hold
        made.batch_select_indices(torch.from_numpy(order.argsort()))
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets other contexts take the slots: these can no longer be read. So does dropping the last reference."""
        if self.hold is not None:
            self.hold.release()

    def segments(self, index: RowIndex) -> list[Segment]:
        """The rows of an extension, slab by slab.

        Args:
            index: the context of each row, in the order of `ranks`.

        Raises:
            ValueError: the contexts have been released.
        """
        if self.hold is not None and self.hold.released:
            raise ValueError("the contexts have been released: hold them for as long as they are read")
        places = self.places[index.contexts]
        bounds = [0, *(np.flatnonzero(np.diff(places[:, 0])) + 1).tolist(), len(places)]
        segments = []
        for start, stop in pairwise(bounds):
            slab = self.slabs[places[start, 0]]
            own = np.flatnonzero(self.places[:, 0] == places[start, 0])
            slots = torch.from_numpy(self.places[own, 1]).to(slab.device)
            lengths = torch.zeros_like(slab.lengths)
            lengths[slots] = self.lengths[torch.from_numpy(own).to(slab.device)]
            segments.append(Segment(slab, lengths, RowIndex(places[start:stop, 1]), slice(start, stop)))
        return segments

    @property
    def slabs_read(self) -> list[TurboKVCache]:
        """The slabs in which the contexts are."""
        return [self.slabs[number] for number in np.unique(self.places[:, 0])]

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """The rank of each context in the order of slabs and slots."""
        ranks: npt.NDArray[np.int64] = np.lexsort((self.places[:, 1], self.places[:, 0])).argsort()
        return ranks

    @property
    def nbytes(self) -> int:
        total = 0
        for number in np.unique(self.places[:, 0]):
            rows = torch.from_numpy(np.flatnonzero(self.places[:, 0] == number)).to(self.device)
            entries = {
                Axis.ROW: len(rows),
                Axis.COLUMN: int(self.lengths[rows].sum()),
                Axis.SLOT: int((self.protected_columns[rows] >= 0).sum()),
            }
            named = self.slabs[number].named_tensors()
            total += sum(entries[axis_of(name)] * entry_bytes(name, tensor) for name, tensor in named)
        return total

    def batch_select_indices(self, indices: Tensor) -> None:
        # All at once, as an interrupt may come between two lines.
        made = copy.copy(self)
        super(PooledContexts, made).batch_select_indices(indices)
        made.places = self.places[torch.as_tensor(indices).cpu().numpy()]
        self.__dict__.update(made.__dict__)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError(_IN_PLACE.format("repeating rows"))

    def crop(self, tokens: int | Tensor) -> None:
        places = list(map(tuple, self.places.tolist()))
        contexts = len(set(places))
        # Read from a device only where rows share a context.
        if (
            isinstance(tokens, Tensor)
            and tokens.shape == self.lengths.shape
            and contexts < len(places)
            and len(set(zip(places, tokens.tolist(), strict=True))) > contexts
        ):
            raise ValueError(_IN_PLACE.format("a length for each row of one context"))
        super().crop(tokens)

    def plan_append(self, *args: Any, **kwargs: Any) -> Append:
        raise ValueError(_IN_PLACE.format("an append"))

    def drop_front(self, tokens: int) -> None:
        raise ValueError(_IN_PLACE.format("dropping tokens at the front"))

    def drop_refinements(self) -> None:
        raise ValueError(_IN_PLACE.format("dropping refinements"))

    def save(self, path: object) -> None:
        raise ValueError(_IN_PLACE.format("saving"))

    def to(self, device: torch.device | str) -> Self:
        raise ValueError(_IN_PLACE.format("moving"))

    def tensors_to_join(self) -> dict[str, Tensor]:
        if self.slabs:
            raise ValueError(_IN_PLACE.format("concatenating"))
        return super().tensors_to_join()

    def cut(self, lengths: Sequence[int]) -> list[Self]:
        raise ValueError(_IN_PLACE.format("cutting"))

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(_IN_PLACE.format("pickling"))

    def _keep_slots(self, slots: int) -> None:
        """Keeps all slots: those of the slabs stay as they are."""
