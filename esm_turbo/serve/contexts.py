"""The contexts of the service: those that clients named, on disk, and what requests derive from them, in memory.

A context is named by its key in the store, a hash of its tokens: of a protein, or of homologs where contexts are exact.
Scores need other contexts of a protein than the plain one: with masks in the place of a candidate, or with `<eos>`.
These stay in memory, ready to be read, up to a budget, and are computed again when they are gone; only the plain ones
are stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from esm_turbo.config import TurboConfig
from esm_turbo.context_store import ContextStore, context_key
from esm_turbo.files.tabular import counted
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.homologs import decode_homologs
from esm_turbo.serve.errors import NO_CONTEXT, RequestError
from esm_turbo.store.tiers import Tier
from esm_turbo.tasks.common.forwards import maybe_decode
from esm_turbo.tasks.common.homologs import stored_ids

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Bytes of sequences whose keys are known without reading a file.
_KNOWN = 32 << 20
# Of a key, about.
_KEY = 256


class Contexts:
    """Contexts of one model: a `ContextSource`. The engine's thread calls it, but for `sequence`.

    Args:
        turbo: the model.
        store: where the contexts that clients named are.
        budget: bytes of memory for contexts that requests read, some of them also decoded to full precision.
        limit: number of contexts in the store from which on further ones are refused.
    """

    def __init__(self, turbo: ContextModel, store: ContextStore, budget: int = 1 << 30, limit: int = 100_000) -> None:
        self.turbo = turbo
        self.store = store
        self.limit = limit
        self.exact = turbo.model.base_model.exact_contexts is not None
        self.stored: int = store.info()["contexts"]
        self.resident = Tier[Hashable, TurboKVCache](budget)
        self._sequences = Tier[str, str](_KNOWN)
        self._mutex = threading.Lock()

    def sequence(self, key: str, field: Sequence[str | int] = ("path", "id")) -> str:
        """Residues of a stored context; homologs are separated by commas. Any thread may call it.

        Args:
            key: of the context.
            field: that names it, for the error.

        Raises:
            RequestError: there is no such context.
        """
        with self._mutex:
            known = self._sequences.get(key)
        if known is not None:
            return known
        cache = self.store.load(self.turbo, key)
        sequence = None if cache is None else self._sequence_of(cache)
        # Other commands also store contexts of parts of sequences.
        if sequence is None or context_key(self.turbo, sequence) != key:
            raise RequestError(404, NO_CONTEXT, field)
        self._remember(key, sequence)
        return sequence

    def add(self, sequences: Sequence[str]) -> list[str]:
        """Compute and store what is missing, and return the keys.

        Raises:
            RequestError: the store is full.
            OSError: writing failed, for example because the disk is full.
        """
        keys = [context_key(self.turbo, sequence) for sequence in sequences]
        if self.stored >= self.limit:
            for key in keys:
                if self.store.load(self.turbo, key) is None:
                    raise RequestError(507, f"the store holds {counted(self.stored, 'context')}, its limit")
        self.stored += self.store.add(self.turbo, list(sequences))
        for key, sequence in zip(keys, sequences, strict=True):
            self._remember(key, sequence)
        return keys

    def get_or_prefill(self, turbo: ContextModel, sequences: Sequence[str], /) -> TurboKVCache:
        """As `ContextStore.get_or_prefill`."""
        return self.store.get_or_prefill(turbo, sequences)

    def get_or_compute(
        self,
        turbo: ContextModel,
        token_ids: Sequence[int],
        config: TurboConfig,
        compute: Callable[[], TurboKVCache],
        /,
    ) -> TurboKVCache:
        """The context of exactly these tokens: a stored one, or one that is computed, and kept by `ready` alone."""
        named = self.exact or not {turbo.codes.eos, turbo.codes.mask} & set(token_ids)
        if named and config == turbo.model.base_model.turbo_config:
            [stored] = self.store.find(turbo, [token_ids], config)
            if stored is not None:
                return stored
        return compute()

    def ready(self, key: Hashable, compute: Callable[[], TurboKVCache], read_by: int = 0) -> TurboKVCache:
        """A context that requests read, which must not be changed.

        Args:
            key: equal for equal contexts.
            compute: called if it is not in memory.
            read_by: number of tokens that will read it decoded if they do so faster, see `forwards.maybe_decode`.
        """
        if read_by and (kept := self.resident.get((key, "decoded"))) is not None:
            return kept
        context = self.resident.get(key)
        if context is None:
            context = compute()
            self.resident.put(key, context, context.nbytes)
        if not read_by or (decoded := maybe_decode(self.turbo, context, read_by)) is context:
            return context
        self.resident.put((key, "decoded"), decoded, decoded.nbytes)
        return decoded

    def _sequence_of(self, cache: TurboKVCache) -> str | None:
        """What a client may have given for a context; None where it holds other tokens than residues between ends."""
        codes = self.turbo.codes
        try:
            ids = stored_ids(codes, cache) if self.exact else cache.token_ids[0, : cache.get_seq_length()].tolist()
            if codes.mask in ids:
                return None
            return decode_homologs(codes, ids) if self.exact else codes.decode(ids[1:])
        except (KeyError, ValueError):
            return None

    def _remember(self, key: str, sequence: str) -> None:
        with self._mutex:
            self._sequences.put(key, sequence, len(sequence) + _KEY)
