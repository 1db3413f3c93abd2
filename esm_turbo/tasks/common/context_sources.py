"""Where tasks look contexts up before they compute them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from esm_turbo.config import TurboConfig
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.pooled import PooledContexts

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


@runtime_checkable
class ContextSource(Protocol):
    """Where tasks look contexts up before they compute them; a `ContextStore` is one."""

    def get_or_prefill(self, turbo: ContextModel, sequences: Sequence[str], /) -> TurboKVCache:
        """As `ContextModel.prefill`, but computes only what is missing."""

    def get_or_compute(
        self,
        turbo: ContextModel,
        token_ids: Sequence[int],
        config: TurboConfig,
        compute: Callable[[], TurboKVCache],
        /,
    ) -> TurboKVCache:
        """The context of exactly these tokens, computed by `compute` if it is missing."""


def check_store(store: object) -> None:
    """Check that `store`, an argument of several tasks, is a `ContextSource` or None.

    Raises:
        ValueError: it is something else, such as the path of one.
    """
    if store is None or isinstance(store, ContextSource):
        return
    path = f"; open the folder: ContextStore({str(store)!r})" if isinstance(store, str | os.PathLike) else ""
    raise ValueError(f"`store` must be a ContextStore, got a {type(store).__name__}{path}")


class ReadableSource(ContextSource, Protocol):
    """A `ContextSource` that can be asked for what it has; a `ContextStore` is one, too."""

    def find(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], config: TurboConfig, /
    ) -> list[TurboKVCache | None]:
        """The contexts of exactly these tokens, None for those not there; called from other threads, too."""

    def keep(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], cache: TurboKVCache, config: TurboConfig, /
    ) -> None:
        """Store computed contexts of exactly these tokens, one a row of the cache."""


class FoundContexts(NamedTuple):
    """Contexts that a store has, of some that it was asked for by token ids.

    Attributes:
        held: those that stay in device memory, where they are read; None if there are none.
        rows: which of the requested ones each row of `held` is.
        copied: the others, each a cache of one row, by their numbers among the requested ones.
    """

    held: PooledContexts | None
    rows: tuple[int, ...]
    copied: dict[int, TurboKVCache]


@runtime_checkable
class HoldingSource(Protocol):
    """A source whose contexts can be read in place, in device memory; a `ContextStore` is one."""

    def hold_found(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], config: TurboConfig, /
    ) -> FoundContexts:
        """The contexts of exactly these tokens that are there; called from other threads, too."""
