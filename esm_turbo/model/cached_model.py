"""The encoders of all families: a cache is written, extended and decoded alike.

A family's class derives from `CachedModel` and from the library's class, whose computation stays the library's own. It
answers what differs between families (`FamilyEncoder`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from esm_turbo.calibration import Calibration
from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.transfers import to_device
from esm_turbo.config import Backend, TurboConfig
from esm_turbo.files.identity import forget_identity
from esm_turbo.kv.append import NO_GAPS
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.cache_engine import CacheEngine
from esm_turbo.model.checkpoints import CheckpointMixin
from esm_turbo.model.executor import Executor
from esm_turbo.model.family_encoder import FamilyEncoder
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.inputs import check_counts, check_inputs, check_lengths, check_new_tokens, most_specials
from esm_turbo.model.plain import is_unhooked
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.ops.backends import KVBackend

if TYPE_CHECKING:
    from transformers.modeling_outputs import ModelOutput


class CacheMethods(CheckpointMixin):
    """The methods of caches, which are the same of an encoder and of a model with a head."""

    @property
    def _encoder(self) -> CachedModel:
        encoder: CachedModel = self.base_model  # type: ignore[attr-defined]
        return encoder

    def set_turbo(
        self,
        *,
        calibration: str | os.PathLike[str] | Calibration | None = None,
        preset: str | TurboConfig | None = None,
        backend: str | Backend = Backend.AUTO,
    ) -> None:
        """Set how new caches are stored and how caches are read.

        Args:
            calibration: a `Calibration` of this model or its path; None leaves the model without one.
            preset: a preset's name or options; None is `turbo3`, which the default arm does not insist on.
            backend: implementation of encoding and packed attention, see `Backend`.

        Raises:
            ValueError: the calibration is unreadable or another model's, or an option is wrong.
            RuntimeError: a call with the model has not ended, such as `score` that calls `progress`.
        """
        self._encoder.kv.configure(calibration, preset, backend)
        self._encoder.executor.graphs.clear()

    @property
    def model_id(self) -> str | None:
        """Name of what runs, where hooks or other unknown code run with the model; None for none.

        With one, contexts can be kept, for models of the same name: change it whenever that code changes.

        Raises:
            ValueError: (when it is set) it is no name.
        """
        return self._encoder.kv.model_id

    @model_id.setter
    def model_id(self, name: str | None) -> None:
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise ValueError(f"`model_id` must be a name or None, got {name!r}")
        self._encoder.kv.model_id = name

    @property
    def kv_backend(self) -> KVBackend:
        """See `CacheEngine.kv_backend`."""
        return self._encoder.kv.kv_backend

    def new_cache(self) -> TurboKVCache:
        """See `CacheEngine.new_cache`."""
        return self._encoder.kv.new_cache()

    def refresh_fingerprint(self) -> bool:
        """See `CacheEngine.refresh_fingerprint`."""
        return self._encoder.kv.refresh_fingerprint()

    def watched(self) -> AbstractContextManager[Callable[[], bool]]:
        """See `CacheEngine.watched`."""
        return self._encoder.kv.watched()

    def bind_cache(self, cache: TurboKVCache) -> None:
        """See `CacheEngine.bind_cache`."""
        self._encoder.kv.bind_cache(cache)

    @contextmanager
    def growing(
        self, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int, uses: int
    ) -> Iterator[Growth | None]:
        """Rows that grow by captured steps, for the caller alone, see `Growth`; None where they cannot be captured.

        Args:
            cache: of this model; how rows are stored. The caller loads them.
            kinds: of the steps to come.
            columns: of the longest row to come, and one for the mask after it.
            uses: number of calls that this one counts for, see `GraphPool`.
        """
        if not is_unhooked(self):  # type: ignore[arg-type]
            yield None
            return
        with self._encoder.executor.growing(cache, kinds, columns, uses) as growth:
            yield growth


class CachedModel(CacheMethods, FamilyEncoder):
    """An encoder with a key/value cache; comes before the library's class among the bases.

    A forward with `use_cache=True` returns a `TurboKVCache` in `past_key_values`; one with `past_key_values` extends
    it. `set_turbo` sets how caches are stored.

    Attributes:
        kv: its caches: options, codec, and which caches are its own.
        executor: plans and runs its forwards.
    """

    kv: CacheEngine
    executor: Executor

    def prepare_turbo(self) -> None:
        """Set the defaults of `set_turbo`; called by the class's `__init__`."""
        self.kv = CacheEngine(self)
        self.executor = Executor(self, self.kv)

    def __copy__(self) -> Self:
        """A shallow copy, which shares the modules that it has, and runs those that are put into it."""
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        # What records outputs lies on the modules that it shares.
        copied._output_capturing_hooks_installed = vars(self).get("_output_capturing_hooks_installed", False)
        return self._with_own_parts(copied)

    def _replicate_for_data_parallel(self) -> Self:
        return self._with_own_parts(super()._replicate_for_data_parallel())

    def _with_own_parts(self, copied: Self) -> Self:
        copied.kv = copy.copy(self.kv)
        copied.kv.encoder = copied
        copied.executor = Executor(copied, copied.kv)
        copied.executor.captures = self.captures
        forget_identity(copied)
        return copied

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        context_index: Sequence[int] | Tensor | None = None,
        use_cache: bool | None = None,
        token_counts: tuple[Tensor, Tensor] | None = None,
        append_mask: Tensor | None = None,
        row_lengths: Sequence[int] | None = None,
        chains: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Run the model as the library's class does, and optionally write or extend a cache.

        Inputs may lie on the host, where their values are known for free. With a cache, masks and positions on a device
        are waited for, and so are ids that are stored, if special tokens are protected. Ids there are not checked.

        Args:
            input_ids: token ids, int64 or int32 [batch, n].
            attention_mask: without a past [batch, n], padded on the right if a cache is written; with a past of P
                columns (`past_key_values.get_seq_length()`) [batch, n] or [batch, P + n], where a zero in the past
                hides that token from that row.
            position_ids: [batch, n] or [1, n]; by default each row's next positions.
            inputs_embeds: replaces `input_ids`; only without a cache.
            past_key_values: the contexts: one for each row of the batch, one that all rows share, or any with a
                `context_index`.
            context_index: the context that each row reads, integers [batch], in any order and as often as you like;
                where it lies on a device, it is waited for. Rows cannot be appended to contexts that they name.
            use_cache: write a cache (False by default, whatever the configuration says). Without a past it holds the
                input; with one the new tokens are appended to the past.
            token_counts: number of tokens and of masks in the whole input that this one is a part of, int64 [batch]
                each, for token dropout; by default counted from this input, or from past and input together.
            append_mask: new tokens to append, bool [batch, n]; by default those that `attention_mask` shows.
            row_lengths: tokens per row, where the host knows them: the sums of `attention_mask`. Without gradients, a
                past or `position_ids`, a float16 or bfloat16 model on CUDA then runs packed rows with fused kernels
                (model/packed_encoder.py); in all other cases it has no effect.
            chains: number of each new token's chain, for the cache to store, integers [batch, n]; None for one chain.
            return_dict: as in the library's class.
            **kwargs: as in the library's class.

        Returns:
            Hugging Face's output, with `past_key_values` set if a cache was written.

        Raises:
            ValueError: the inputs contradict each other or the cache, or a cache is used while gradients are recorded.
            TypeError: there are arguments that the family does not have, see `FamilyEncoder.options`.
            RuntimeError: another thread changed the cache meanwhile.
        """
        asked = {name for name, value in kwargs.items() if value is not None and value is not False}
        if self.options is not None and (unknown := asked - self.options):
            raise TypeError(f"the forward of {self.family.name} takes no {', '.join(map(repr, sorted(unknown)))}")
        past = past_key_values
        if past is not None and not isinstance(past, TurboKVCache):
            raise ValueError(f"`past_key_values` must be a TurboKVCache, got {type(past).__name__}")
        extends, known = past is not None and past.batch_size > 0, NO_GAPS
        if (extends or use_cache) and torch.is_grad_enabled():
            raise ValueError("a cache cannot be used while gradients are recorded: use torch.no_grad()")
        if extends or use_cache:
            if input_ids is None or inputs_embeds is not None:
                raise ValueError("a forward with a cache needs `input_ids`")
            check_inputs(input_ids, attention_mask, position_ids, self.config.vocab_size, extends=extends)
            append_mask = append_mask if use_cache else None
            known = check_new_tokens(input_ids, attention_mask, append_mask)
            if use_cache and (self.turbo_config if past is None else past.config).protect_special_tokens:
                known = known._replace(specials=most_specials(input_ids, append_mask, self.protected_ids))
        if row_lengths is not None and attention_mask is not None and not extends:
            check_lengths(row_lengths, attention_mask)
        if token_counts is not None and input_ids is not None:
            check_counts(token_counts, len(input_ids))
        if context_index is not None and not extends:
            raise ValueError("`context_index` needs `past_key_values` with contexts")
        options = {**kwargs, "return_dict": True}
        if options.get("output_hidden_states") is None:
            options["output_hidden_states"] = self.config.output_hidden_states
        inputs = ForwardInputs(
            self._here(input_ids),
            self._here(attention_mask),
            self._here(position_ids),
            inputs_embeds,
            context_index,
            bool(use_cache),
            token_counts,
            self._here(append_mask),
            row_lengths,
            self._here(chains),
            known,
            options,
        )
        cache = None
        if extends or use_cache:
            cache = self.new_cache() if past is None else past
        output = self.executor.forward(inputs, cache)
        if self.is_spread:
            for name in ("hidden_states", "attentions"):
                if (of_layers := output.get(name)) is not None:
                    output[name] = tuple(x.to(self.device) for x in of_layers)
        output.past_key_values = cache if use_cache else None
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _here(self, x: Tensor | None) -> Tensor | None:
        """An input that may lie on the host, on the model's device."""
        if x is None or x.device.type != "cpu":
            return x
        device = self.device
        return x if device.type == "meta" else to_device(x, device)

    @property
    def calibration(self) -> Calibration | None:
        """The calibration from which codecs are made."""
        return self.kv.calibration

    @property
    def turbo_config(self) -> TurboConfig:
        """Options of new caches."""
        return self.kv.config

    @turbo_config.setter
    def turbo_config(self, config: TurboConfig) -> None:
        self.kv.config = config

    @property
    def preset_chosen(self) -> bool:
        """True if `set_turbo` was given a preset; then it is used or refused, never left aside."""
        return self.kv.preset_chosen

    @preset_chosen.setter
    def preset_chosen(self, chosen: bool) -> None:
        self.kv.preset_chosen = chosen

    @property
    def backend(self) -> str | Backend:
        """Implementation of encoding and packed attention, by name."""
        return self.kv.backend

    @property
    def captures(self) -> bool:
        """True if calls that recur are captured as CUDA graphs; set it to False for eager calls only."""
        return self.executor.captures

    @captures.setter
    def captures(self, captures: bool) -> None:
        self.executor.captures = captures

    @property
    def replays(self) -> bool:
        """See `Executor.replays`."""
        return self.executor.replays

    def codec(self, config: TurboConfig) -> KVCodec:
        """See `CacheEngine.codec`."""
        return self.kv.codec(config)

    def warmup(self) -> int:
        """See `CacheEngine.warmup`."""
        return self.kv.warmup()

    @torch.no_grad()
    def decoded(self, cache: TurboKVCache) -> TurboKVCache:
        """Contexts at full precision, as read from the compressed ones: larger, and faster to read for many rows.

        Args:
            cache: of this model. It is returned as it is if it is stored at full precision.

        Raises:
            ValueError: the cache is empty, or another model's.
        """
        return self.executor.decoded(cache)
