"""The masked language models of all families, which hand everything about caches on to their encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.modeling_outputs import MaskedLMOutput

from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cached_model import CacheMethods
from esm_turbo.model.plain import check_tokenwise

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _LibraryModel
else:
    _LibraryModel = object


@dataclass
class TurboMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the cache, where one was written."""

    past_key_values: TurboKVCache | None = None


class CachedMaskedLM(CacheMethods, _LibraryModel):
    """A `CachedModel` with a language-model head; comes before the library's class among the bases."""

    def forward_with_head(
        self,
        library_forward: Callable[..., Any],
        *args: Any,
        past_key_values: TurboKVCache | None,
        use_cache: bool | None,
        return_dict: bool | None,
        **kwargs: Any,
    ) -> TurboMaskedLMOutput | tuple[Any, ...]:
        """Run the library's forward, and optionally with a cache: see `CachedModel.forward`.

        Raises:
            ValueError: as of `CachedModel.forward`; or, with contexts, as of `check_tokenwise`.
        """
        if isinstance(past_key_values, TurboKVCache) and past_key_values.batch_size:
            check_tokenwise(self)
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        output = library_forward(
            self, *args, past_key_values=past_key_values, use_cache=bool(use_cache), return_dict=True, **kwargs
        )
        result = TurboMaskedLMOutput(**output, past_key_values=past_key_values if use_cache else None)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()
