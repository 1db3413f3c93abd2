"""ESM-2 as Hugging Face has it, with a key/value cache.

Without a cache every computation is Hugging Face's own code. With one, the self-attention hands its keys and values
to a session (sessions.py), which encodes them (prefill) or attends to a cache (extension).
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm.modeling_esm import (
    EsmLayer,
    EsmLMHead,
    EsmRotaryEmbedding,
    EsmSelfAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from esm_turbo.calibration import CALIBRATION_FILE, Calibration
from esm_turbo.codecs import KVCodec, codec_class, codec_without_calibration
from esm_turbo.config import DEFAULT_PRESET, Backend, Geometry, TurboConfig
from esm_turbo.files.fingerprint import model_fingerprint, same_codec, same_model
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.sessions import Extension, KVSession, Prefill
from esm_turbo.ops.backends import resolve_backend

# The share of residues that ESM-2 saw masked in training (Lin et al. 2023), undone by token dropout.
_TRAINED_MASK_RATIO = 0.15 * 0.8
_INV_FREQ = "rotary_embeddings.inv_freq"
# transformers 5 saves one key for all layers, with an asterisk for the layer's number.
_PUBLISHED_INV_FREQ = r"encoder\.layer\.(?:\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq"
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file;'
    " state = torch.load('pytorch_model.bin', map_location='cpu', weights_only=False);"
    " save_file({k: v.clone() for k, v in state.items()}, 'model.safetensors', metadata={'format': 'pt'})\""
)
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass
class TurboMaskedLMOutput(MaskedLMOutput):
    """Hugging Face's output, and the cache where one was asked for."""

    past_key_values: TurboKVCache | None = None


class TurboEsmSelfAttention(EsmSelfAttention):
    """Self-attention that hands queries, keys and values to a session where there is one.

    Attributes:
        joined: weight and bias of the three projections as one, for extensions; see `joined_projections`.
    """

    joined: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        kv_session: KVSession | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if kv_session is None:
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                position_embeddings,
                **kwargs,
            )
            return plain
        assert position_embeddings is not None
        shape, scale = (*hidden_states.shape[:-1], -1, self.attention_head_size), self.attention_head_size**-0.5
        extends = isinstance(kv_session, Extension)
        if extends and self.joined is not None:
            projected = nn.functional.linear(hidden_states, *self.joined).chunk(3, dim=-1)
        else:
            projected = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        query, keys, values = (x.unflatten(-1, shape[-2:]).transpose(1, 2) for x in projected)
        if isinstance(kv_session, Extension):
            query, keys = kv_session.rotate(query, keys, *position_embeddings, scale)
        else:
            query, keys = apply_rotary_pos_emb(query * scale, keys, *position_embeddings)
        weights = None
        output = kv_session.attend(self.layer_idx, query, keys, values)
        if output is not None:
            output = output.transpose(1, 2)
        else:
            attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            output, weights = attend(
                self,
                query,
                keys,
                values,
                attention_mask,
                dropout=self.dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return output.reshape(*hidden_states.shape[:-1], -1).contiguous(), weights


class TurboEsmLayer(EsmLayer):
    """A layer that lets a session compute the activation."""

    def forward(self, hidden_states: Tensor, *args: Any, kv_session: KVSession | None = None, **kwargs: Any) -> Tensor:
        output: Tensor
        if not isinstance(kv_session, Extension):
            output = super().forward(hidden_states, *args, kv_session=kv_session, **kwargs)
            return output
        hidden_states = self.attention(hidden_states, *args, kv_session=kv_session, **kwargs)
        activated = kv_session.gelu(self.intermediate.dense(self.LayerNorm(hidden_states)))
        output = self.output(activated, hidden_states)
        return output


class TurboEsmRotaryEmbedding(EsmRotaryEmbedding):
    """Rotary frequencies that stay in float32 whatever the model is cast to."""

    inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return self


class _AttentionWeights(KVSession):
    """Records the attention weights of every layer, whatever implementation the model runs with."""

    def __init__(self, attention_mask: Tensor) -> None:
        self.hidden = attention_mask[:, None, None, :] == 0
        self.weights: list[Tensor] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        scores = query @ keys.transpose(2, 3)
        scores = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min)
        self.weights.append(scores.softmax(dim=-1))


def _joined(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor] | None:
    """Weights and biases of linear layers as one each, of which their own become parts; None for any other modules."""
    if not all(_is_plain(x) and x.bias is not None for x in linears):
        return None
    weight, bias = (_side_by_side([getattr(x, name) for x in linears]) for name in ("weight", "bias"))
    return weight, bias


def _is_plain(linear: nn.Module) -> bool:
    """Whether it does nothing but multiply: adapters replace the module or its forward, or hook into it."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return type(linear) is nn.Linear and not hooked


def _side_by_side(parts: Sequence[nn.Parameter]) -> Tensor:
    first, sizes = parts[0], [part.shape[0] for part in parts]
    starts = [first.data_ptr() + first[0].nbytes * sum(sizes[:i]) for i in range(len(parts))]
    shared = all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts)
    if shared and all(part.is_contiguous() for part in parts) and [part.data_ptr() for part in parts] == starts:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, own in zip(parts, whole.split(sizes), strict=True):
        part.data = own
    return whole


class _TurboMixin:
    """Loading and saving, the same for both classes."""

    config: EsmConfig

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        preset: str | TurboConfig = DEFAULT_PRESET,
        backend: str | Backend = Backend.AUTO,
        **kwargs: Any,
    ) -> Self:
        """Loads any ESM-2 checkpoint as Hugging Face's class does.

        Args:
            pretrained_model_name_or_path: a hub id or a folder.
            calibration: a `Calibration` or its path; by default the one in the folder, if there is one; False for none.
            preset: what caches are stored as.
            backend: what runs the packed attention.
            *args: as of `PreTrainedModel.from_pretrained`.
            **kwargs: as of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint is not ESM-2, its weights are not finite, the calibration is another model's,
                or an option is wrong.
            OSError: there is no such checkpoint, or the hub cannot be reached.
        """
        check_is_esm2(pretrained_model_name_or_path, kwargs)
        # Hugging Face renames these keys for its own classes only.
        kwargs.setdefault("key_mapping", {_PUBLISHED_INV_FREQ: _INV_FREQ})
        wants_report = kwargs.pop("output_loading_info", False)
        try:
            loaded, report = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{pretrained_model_name_or_path}: pytorch_model.bin is damaged, or holds more than tensors and is not"
                f" run; if you trust where it is from, convert it: {_CONVERT}"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except (SafetensorError, EOFError, RuntimeError) as error:
            reason = str(error).partition(". ")[0]
            raise ValueError(
                f"{pretrained_model_name_or_path}: the weights are damaged or do not fit config.json ({reason})"
            ) from error
        in_folder = os.path.join(pretrained_model_name_or_path, CALIBRATION_FILE)
        if calibration is None and os.path.isfile(in_folder):
            calibration = in_folder
        _check_complete(pretrained_model_name_or_path, report["missing_keys"])
        check_weights(loaded)
        loaded.set_turbo(calibration=calibration or None, preset=preset, backend=backend)
        return (loaded, report) if wants_report else loaded  # type: ignore[return-value]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves as Hugging Face's class does, with the rotary frequencies in float32 under the published keys."""
        state = kwargs.pop("state_dict", None) or self.state_dict()  # type: ignore[attr-defined]
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(  # type: ignore[misc]
            save_directory, state_dict=_published_keys(state, self.config.num_hidden_layers), **kwargs
        )

    @contextmanager
    def joined_projections(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Lets extensions make queries, keys and values in one multiplication: of few tokens, one takes as long as all.

        The parameters stay what they are, but come to lie side by side: what a graph captures of them stays right while
        they are written into, and is kept alive by what is returned. A graph that was captured before they moved still
        reads where they were, which may be anything by then. Projections that are more than linear layers, such as
        adapters', are left as they are.
        """
        attentions = [x for x in self.modules() if isinstance(x, TurboEsmSelfAttention)]  # type: ignore[attr-defined]
        for attention in attentions:
            attention.joined = _joined([attention.query, attention.key, attention.value])
        try:
            yield [attention.joined for attention in attentions if attention.joined is not None]
        finally:
            for attention in attentions:
                attention.joined = None


class TurboEsmModel(_TurboMixin, EsmModel):
    """`EsmModel` with a key/value cache.

    A forward with `use_cache=True` returns a `TurboKVCache` in `past_key_values`; one with `past_key_values` extends
    it. See `set_turbo` for what the cache stores.
    """

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)
    _no_split_modules = ("TurboEsmLayer", "EsmEmbeddings")

    def __init__(self, config: EsmConfig, add_pooling_layer: bool = True) -> None:
        _check_config(config)
        super().__init__(config, add_pooling_layer)
        for index, layer in enumerate(self.encoder.layer):
            # Only the class changes: the parameters and their initialisation stay Hugging Face's.
            layer.__class__ = TurboEsmLayer
            layer.attention.self.__class__ = TurboEsmSelfAttention
            layer.attention.self.layer_idx = index
        self.rotary_embeddings.__class__ = TurboEsmRotaryEmbedding
        self.calibration: Calibration | None = None
        self.turbo_config = TurboConfig.from_preset(DEFAULT_PRESET)
        self.backend: str | Backend = Backend.AUTO

    @classmethod
    def from_esm(cls, model: EsmModel, **turbo: Any) -> Self:
        """A model that shares the weights of an `EsmModel`, which stays as it is.

        Args:
            model: Hugging Face's model.
            **turbo: as of `set_turbo`.
        """
        converted = _share_weights(model, cls, add_pooling_layer=model.pooler is not None)
        converted.set_turbo(**turbo)
        return converted

    def set_turbo(
        self,
        *,
        calibration: str | os.PathLike[str] | Calibration | None = None,
        preset: str | TurboConfig = DEFAULT_PRESET,
        backend: str | Backend = Backend.AUTO,
    ) -> None:
        """Sets what new caches store, and how caches are read.

        Args:
            calibration: a `Calibration` of this model or its path.
            preset: a preset's name or options.
            backend: see `Backend`.

        Raises:
            ValueError: the calibration is unreadable or another model's, or an option is wrong.
        """
        config = TurboConfig.from_preset(preset)
        codec_class(config)
        resolve_backend(backend, self.device)
        if isinstance(calibration, str | os.PathLike):
            calibration = Calibration.load(calibration)
        if calibration is not None:
            if not isinstance(calibration, Calibration):
                raise ValueError(f"`calibration` must be a Calibration or its path, got {calibration!r}")
            calibration.check_model(self)
        self.calibration, self.turbo_config, self.backend = calibration, config, backend

    def codec(self, config: TurboConfig) -> KVCodec:
        """The codec for these options.

        Raises:
            ValueError: the options need a calibration and the model has none, or another model's.
        """
        if self.calibration is not None:
            return self.calibration.codec(config)
        codec = codec_without_calibration(config, Geometry.of(self.config))
        if codec is not None:
            return codec
        raise ValueError(
            f"preset {config.name!r} needs a calibration of this model: make one with `esm-turbo calibrate"
            " PROTEINS.fasta --model MODEL --out calibration.safetensors` and pass calibration=,"
            " or use preset='exact'"
        )

    def new_cache(self) -> TurboKVCache:
        """An empty cache of this model."""
        return TurboKVCache(
            self.turbo_config,
            Geometry.of(self.config),
            model_fingerprint(self),
            self.codec(self.turbo_config),
            self.device,
        )

    def claim_cache(self, cache: TurboKVCache) -> None:
        """Makes sure that a cache is this model's, and gives it the codec that reads it.

        Raises:
            ValueError: it is another model's, or the model lacks the calibration to read it.
        """
        geometry = Geometry.of(self.config)
        if cache.geometry != geometry:
            raise ValueError(f"the cache is for {cache.geometry}, the model has {geometry}")
        if not same_model(cache.fingerprint, model_fingerprint(self)):
            raise ValueError("the cache belongs to another model: the weights differ")
        codec = self.codec(cache.config)
        if not same_codec(cache.codec_fingerprint, codec.fingerprint):
            raise ValueError("the cache was written with another calibration: this one cannot read its codes")
        cache.check_layout(codec)
        cache.codec = codec

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        token_counts: tuple[Tensor, Tensor] | None = None,
        append_mask: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple[Any, ...]:
        """As of `EsmModel`, and with a cache.

        Args:
            input_ids: [batch, n].
            attention_mask: without a past [batch, n], padded on the right where a cache is written; with a past of P
                columns (`past_key_values.get_seq_length()`) [batch, n] or [batch, P + n], where a zero in the past
                hides that token from that row.
            position_ids: [batch, n]; by default each row's next ones.
            inputs_embeds: instead of `input_ids`, without a cache only.
            past_key_values: the context. One of a single row serves every row of the batch.
            use_cache: write a cache (False by default, whatever the configuration says): the context's where there is
                no past, else the past with the new tokens appended.
            token_counts: int64 [batch] each, the tokens and the masks of the whole input that this is a part of, for
                token dropout; by default counted from this input, or from past and input together.
            append_mask: which of the new tokens are appended, bool [batch, n]; by default those that
                `attention_mask` shows. One that leaves tokens out before others needs `position_ids` on a device,
                where nothing waits to find that out.
            return_dict: as of `EsmModel`.
            **kwargs: as of `EsmModel`.

        Returns:
            Hugging Face's output, its `past_key_values` set where a cache was written.

        Raises:
            ValueError: the inputs contradict each other or the cache, or gradients are on where a cache is used.
        """
        past = past_key_values
        if past is not None and not isinstance(past, TurboKVCache):
            raise ValueError(f"`past_key_values` must be a TurboKVCache, got {type(past).__name__}")
        extends = past is not None and past.batch_size > 0
        if (extends or use_cache) and torch.is_grad_enabled():
            raise ValueError("a cache cannot be used while gradients are recorded: use torch.no_grad()")
        kwargs["return_dict"] = True
        if extends or use_cache:
            if input_ids is None or inputs_embeds is not None:
                raise ValueError("a forward with a cache needs `input_ids`")
            _check_inputs(input_ids, attention_mask, position_ids, self.config.vocab_size)
        if extends:
            assert past is not None and input_ids is not None
            output = self._extend(
                past, input_ids, attention_mask, position_ids, bool(use_cache), append_mask, token_counts, kwargs
            )
            written = past if use_cache else None
        elif use_cache:
            assert input_ids is not None
            written = self.new_cache() if past is None else past
            output = self._prefill(written, input_ids, attention_mask, position_ids, append_mask, token_counts, kwargs)
        else:
            written = None
            kwargs["use_cache"] = False
            if token_counts is not None and input_ids is not None:
                inputs_embeds = self._embed(input_ids, _token_mask(input_ids, attention_mask), token_counts)
                input_ids = None
            output = super().forward(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        output.past_key_values = written
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _prefill(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        append_mask: Tensor | None,
        token_counts: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        self.claim_cache(cache)
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must be [batch, n] = {list(input_ids.shape)}, got {list(attention_mask.shape)}"
            )
        mask = _token_mask(input_ids, attention_mask)
        keep, stored_positions = mask, position_ids
        if append_mask is not None:
            computed = torch.arange(mask.shape[1], device=mask.device) if position_ids is None else position_ids
            keep, stored_positions = (
                append_mask,
                _stored_positions(append_mask, mask, position_ids, computed.expand_as(input_ids)),
            )
        append = cache.plan_append(input_ids, keep, stored_positions, self.special_ids)
        session = Prefill(cache, append)
        if token_counts is None:
            _check_not_all_masked(_counts(input_ids, mask, self.config.mask_token_id))
            output = super().forward(input_ids, attention_mask, position_ids, kv_session=session, **kwargs)
        else:
            embeddings = self._embed(input_ids, mask, token_counts)
            output = super().forward(
                None, attention_mask, position_ids, inputs_embeds=embeddings, kv_session=session, **kwargs
            )
        cache.commit(append)
        return output

    def _extend(
        self,
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        appends: bool,
        append_mask: Tensor | None,
        token_counts: tuple[Tensor, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        if kwargs.get("output_attentions"):
            raise ValueError("`output_attentions` is not available at an extension: the scores are never held at once")
        if cache.codec is None or cache.codec is not self._known_codec(cache.config):
            self.claim_cache(cache)
        batch_size, n = input_ids.shape
        if cache.batch_size not in (1, batch_size):
            raise ValueError(f"the cache has {cache.batch_size} rows, the extension {batch_size}; only 1 is shared")
        if appends and cache.batch_size != batch_size:
            raise ValueError(
                f"cannot append {batch_size} rows to a cache of one: repeat it first, cache.batch_repeat_interleave"
            )
        past_mask, new_mask = _split_mask(cache, input_ids, attention_mask)
        if token_counts is None:
            token_counts = self._counts_with_past(cache, past_mask, input_ids, new_mask)
        embeddings = self._embed(input_ids, new_mask, token_counts)
        given = position_ids
        if position_ids is None:
            position_ids = cache.next_positions[:, None] + torch.arange(n, device=input_ids.device)
        append = None
        if appends:
            keep = new_mask if append_mask is None else append_mask
            append = cache.plan_append(
                input_ids, keep, _stored_positions(keep, new_mask, given, position_ids), self.special_ids
            )
        session = Extension(
            cache,
            resolve_backend(self.backend, self.device),
            past_mask,
            None if attention_mask is None else new_mask,
            append,
            None if attention_mask is None or attention_mask.shape[1] == n else past_mask,
        )
        output = super().forward(
            None, None, position_ids.expand(batch_size, n), inputs_embeds=embeddings, kv_session=session, **kwargs
        )
        if append is not None:
            cache.commit(append)
        return output

    def _known_codec(self, config: TurboConfig) -> KVCodec | None:
        return None if self.calibration is None else self.calibration.codec(config)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """`<cls>` and `<eos>` (ESM-2's vocabulary starts with `<cls>`, which its configurations do not name)."""
        return (0, 2 if self.config.eos_token_id is None else self.config.eos_token_id)

    def _counts_with_past(
        self, cache: TurboKVCache, past_mask: Tensor | None, input_ids: Tensor, new_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and masks that each row sees, past and new together."""
        seen = cache.valid() if past_mask is None else past_mask
        tokens, masks = _counts(input_ids, new_mask, self.config.mask_token_id)
        masked = seen & (cache.token_ids == self.config.mask_token_id)
        return tokens + seen.sum(1), masks + masked.sum(1)

    def _embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor]) -> Tensor:
        """Embeddings as Hugging Face's, with token dropout for a larger input than this one."""
        embeddings: Tensor = self.embeddings.word_embeddings(input_ids)
        if self.embeddings.token_dropout:
            _check_not_all_masked(counts)
            tokens, masks = (count.to(input_ids.device) for count in counts)
            scale = (1 - _TRAINED_MASK_RATIO) / (1 - masks.float() / tokens)
            embeddings = embeddings.masked_fill((input_ids == self.config.mask_token_id)[..., None], 0.0)
            embeddings = (embeddings * scale[:, None, None]).to(embeddings.dtype)
        if self.embeddings.layer_norm is not None:
            embeddings = self.embeddings.layer_norm(embeddings)
        return embeddings * mask[..., None].to(embeddings.dtype)

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """As of `EsmModel`, with any attention implementation."""
        session = _AttentionWeights(attention_mask)
        super().forward(tokens, attention_mask, return_dict=True, kv_session=session)
        attentions = torch.stack(session.weights, dim=1)
        attentions = attentions * attention_mask[:, None, None, None, :] * attention_mask[:, None, None, :, None]
        contacts: Tensor = self.contact_head(tokens, attentions)
        return contacts


class TurboEsmForMaskedLM(_TurboMixin, EsmForMaskedLM):
    """`EsmForMaskedLM` with a key/value cache; see `TurboEsmModel`."""

    _keep_in_fp32_modules_strict = ("rotary_embeddings",)

    def __init__(self, config: EsmConfig) -> None:
        _check_config(config)
        # Skips EsmForMaskedLM's own, which would build an EsmModel.
        super(EsmForMaskedLM, self).__init__(config)
        self.esm = TurboEsmModel(config, add_pooling_layer=False)
        self.lm_head = EsmLMHead(config)
        self.post_init()

    @classmethod
    def from_esm(cls, model: EsmForMaskedLM, **turbo: Any) -> Self:
        """A model that shares the weights of an `EsmForMaskedLM`, which stays as it is.

        Args:
            model: Hugging Face's model.
            **turbo: as of `TurboEsmModel.set_turbo`.
        """
        converted = _share_weights(model, cls)
        converted.set_turbo(**turbo)
        return converted

    def set_turbo(self, **turbo: Any) -> None:
        """See `TurboEsmModel.set_turbo`."""
        self.esm.set_turbo(**turbo)

    def claim_cache(self, cache: TurboKVCache) -> None:
        """See `TurboEsmModel.claim_cache`."""
        self.esm.claim_cache(cache)

    def new_cache(self) -> TurboKVCache:
        """See `TurboEsmModel.new_cache`."""
        return self.esm.new_cache()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        past_key_values: TurboKVCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TurboMaskedLMOutput | tuple[Any, ...]:
        """As of `EsmForMaskedLM`, and with a cache: see `TurboEsmModel.forward`."""
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        output = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            labels=labels,
            past_key_values=past_key_values,
            use_cache=bool(use_cache),
            return_dict=True,
            **kwargs,
        )
        result = TurboMaskedLMOutput(**output, past_key_values=past_key_values if use_cache else None)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return result if wants_dict else result.to_tuple()


def check_is_esm2(name_or_path: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Makes sure that a checkpoint is ESM-2 before anything is loaded.

    Raises:
        ValueError: it is another architecture.
        OSError: there is no such checkpoint, or the hub cannot be reached.
    """
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    config, _ = PreTrainedConfig.get_config_dict(
        name_or_path, **{name: options[name] for name in names if name in options}
    )
    if not config:
        raise OSError(f"{name_or_path}: there is no config.json")
    kind = config.get("model_type")
    if kind != "esm":
        raise ValueError(f"{name_or_path}: not ESM-2 but model type {kind!r}")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "rotary":
        raise ValueError(f"{name_or_path}: not ESM-2 but an ESM model with {positions} positions (ESM-1?)")


def _check_config(config: EsmConfig) -> None:
    if config.position_embedding_type != "rotary" or config.is_decoder or config.is_folding_model:
        raise ValueError("TurboEsm needs an ESM-2 encoder: rotary positions, no decoder, no folding trunk")


def check_weights(model: nn.Module) -> None:
    """Makes sure that all weights are finite.

    Raises:
        ValueError: naming the first parameter that holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            raise ValueError(f"the weights are damaged: {name} holds NaN or infinity")


def _check_complete(name_or_path: str | os.PathLike[str], missing: Iterable[str]) -> None:
    """Makes sure that a checkpoint held the encoder; Hugging Face would go on with random weights.

    Raises:
        ValueError: naming the first weight that is missing. Heads and the pooler may be.
    """
    # Rotary frequencies follow from the configuration.
    needed = (name for name in missing if not name.endswith(_INV_FREQ))
    lacking = sorted(name for name in needed if "encoder.layer." in name or "embeddings." in name)
    if lacking:
        raise ValueError(
            f"{name_or_path}: the checkpoint lacks {len(lacking)} weights of the encoder, such as {lacking[0]};"
            " is it ESM-2, and complete?"
        )


def _share_weights(model: nn.Module, cls: type[_Model], **options: Any) -> _Model:
    """A `cls` with the very parameters and buffers of `model`."""
    with torch.device("meta"):
        converted = cls(copy.deepcopy(model.config), **options)
    for name, module in converted.named_modules():
        source = model.get_submodule(name)
        module._parameters.update(source._parameters)
        module._buffers.update(source._buffers)
        module.training = source.training
    return converted


def _published_keys(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Renames the model's rotary frequencies to those of the published checkpoints, one copy per layer."""
    published = {}
    for name, tensor in state.items():
        if name.endswith(_INV_FREQ):
            prefix = name.removesuffix(_INV_FREQ)
            for index in range(num_layers):
                published[f"{prefix}encoder.layer.{index}.attention.self.{_INV_FREQ}"] = tensor.clone()
        else:
            published[name] = tensor
    return published


def _token_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask != 0


def _counts(input_ids: Tensor, mask: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    return mask.sum(1), (mask & (input_ids == mask_token_id)).sum(1)


def _split_mask(cache: TurboKVCache, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """What each row sees of the past, bool [batch, columns] or None for all, and which new tokens are real."""
    batch_size, n = input_ids.shape
    past = cache.get_seq_length() if attention_mask is not None and attention_mask.shape[1] != n else 0
    if attention_mask is not None and attention_mask.shape != (batch_size, past + n):
        raise ValueError(
            f"`attention_mask` must be [batch, n] = [{batch_size}, {n}] or [batch, past + n] ="
            f" [{batch_size}, {cache.get_seq_length() + n}], got {list(attention_mask.shape)}"
        )
    valid = cache.valid()
    ragged = valid.device.type != "cpu" or not bool(valid.all())
    past_mask = valid.expand(batch_size, -1) if ragged else None
    if past:
        assert attention_mask is not None
        given = attention_mask[:, :past] != 0
        if given.device.type == "cpu" and bool((given & ~valid[:, :past]).any()):
            row = int((given & ~valid[:, :past]).any(1).nonzero()[0])
            length = int(cache.lengths[row % cache.batch_size])
            raise ValueError(f"`attention_mask` shows past tokens that row {row} does not hold: it has {length}")
        past_mask = given & valid[:, :past]
        spare = cache.columns - past
        if spare:
            past_mask = torch.cat([past_mask, past_mask.new_zeros(batch_size, spare)], dim=1)
        attention_mask = attention_mask[:, past:]
    new_mask = _token_mask(input_ids, attention_mask)
    _check_right_padded(new_mask)
    return past_mask, new_mask


def _check_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, vocab_size: int
) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"`input_ids` must be [batch, n] with n >= 1, got {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` must be int64 or int32, got {input_ids.dtype}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"`attention_mask` must have two dimensions, got {list(attention_mask.shape)}")
    n = input_ids.shape[1]
    if position_ids is not None and position_ids.shape not in (input_ids.shape, (1, n)):
        raise ValueError(f"`position_ids` must be [batch, {n}] or [1, {n}], got {list(position_ids.shape)}")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"`position_ids` must be integers, got {position_ids.dtype}")
    # Values are checked on the CPU only: elsewhere it would wait for the device.
    if input_ids.device.type == "cpu":
        if bool(((input_ids < 0) | (input_ids >= vocab_size)).any()):
            raise ValueError(f"`input_ids` must lie in 0 to {vocab_size - 1}")
        if position_ids is not None and bool((position_ids < 0).any()):
            raise ValueError("`position_ids` must not be negative")
        if attention_mask is not None and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
            raise ValueError("`attention_mask` must hold zeros and ones")
        if attention_mask is not None and attention_mask.shape == input_ids.shape:
            _check_right_padded(attention_mask != 0)


def _stored_positions(keep: Tensor, mask: Tensor, given: Tensor | None, computed: Tensor) -> Tensor | None:
    """Positions to store of the tokens that are kept of those in `mask`; None for the next ones of each row."""
    if keep.shape != mask.shape or keep.dtype != torch.bool:
        raise ValueError(f"`append_mask` must be bool {list(mask.shape)}, got {keep.dtype} {list(keep.shape)}")
    if keep.device.type == "cpu" and bool((keep & ~mask).any()):
        raise ValueError("`append_mask` keeps tokens that `attention_mask` hides")
    # After a token that is left out, the others keep the places that they are computed at.
    holes = keep.device.type == "cpu" and bool((keep[:, 1:] & ~keep[:, :-1]).any() | ~keep[:, 0].all())
    return computed if holes else given


def _check_right_padded(mask: Tensor) -> None:
    if mask.device.type == "cpu" and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        row = int((mask[:, 1:] & ~mask[:, :-1]).any(1).nonzero()[0])
        raise ValueError(f"`attention_mask` of row {row} is padded on the left or has holes; pad on the right")


def _check_not_all_masked(counts: tuple[Tensor, Tensor]) -> None:
    tokens, masks = counts
    if tokens.device.type == "cpu" and bool((masks >= tokens).any()):
        row = int((masks >= tokens).nonzero()[0])
        raise ValueError(f"row {row} has no token but <mask> or padding: token dropout has no scale for it")
