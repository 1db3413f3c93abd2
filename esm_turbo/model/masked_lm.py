"""The masked language models of all families, which hand everything about caches on to their encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.modeling_outputs import MaskedLMOutput

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.checkpoints import CheckpointMixin
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.plain import is_unhooked
from esm_turbo.ops.backends import KVBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _LibraryModel
else:
    _LibraryModel = object


@dataclass
class TurboMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the cache, where one was written."""

    past_key_values: TurboKVCache | None = None


class CachedMaskedLM(CheckpointMixin, _LibraryModel):
    """A `CachedModel` with a language-model head; comes before the library's class among the bases."""

    def set_turbo(self, **turbo: Any) -> None:
        """See `CachedModel.set_turbo`."""
        self.base_model.set_turbo(**turbo)

    @property
    def kv_backend(self) -> KVBackend:
        """See `CachedModel.kv_backend`."""
        backend: KVBackend = self.base_model.kv_backend
        return backend

    @property
    def model_id(self) -> str | None:
        """See `CachedModel.model_id`."""
        name: str | None = self.base_model.model_id
        return name

    @model_id.setter
    def model_id(self, name: str | None) -> None:
        self.base_model.model_id = name

    def refresh_fingerprint(self) -> bool:
        """See `CachedModel.refresh_fingerprint`."""
        changed: bool = self.base_model.refresh_fingerprint()
        return changed

    def bind_cache(self, cache: TurboKVCache) -> None:
        """See `CachedModel.bind_cache`."""
        self.base_model.bind_cache(cache)

    def new_cache(self) -> TurboKVCache:
        """See `CachedModel.new_cache`."""
        cache: TurboKVCache = self.base_model.new_cache()
        return cache

    @contextmanager
    def growing(
        self, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int, uses: int
    ) -> Iterator[Growth | None]:
        """See `CachedModel.growing`."""
        if not is_unhooked(self):
            yield None
            return
        with self.base_model.growing(cache, kinds, columns, uses) as growth:
            yield growth

    def forward_with_head(
        self,
        library_forward: Callable[..., Any],
        *args: Any,
        past_key_values: TurboKVCache | None,
        use_cache: bool | None,
        return_dict: bool | None,
        **kwargs: Any,
    ) -> TurboMaskedLMOutput | tuple[Any, ...]:
        """Run the library's forward, and optionally with a cache: see `CachedModel.forward`."""
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        output = library_forward(
            self, *args, past_key_values=past_key_values, use_cache=bool(use_cache), return_dict=True, **kwargs
        )
        result = TurboMaskedLMOutput(**output, past_key_values=past_key_values if use_cache else None)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()
