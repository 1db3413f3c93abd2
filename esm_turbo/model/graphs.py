"""Extensions as one CUDA graph: a step of a few tokens is otherwise slower to launch than to compute."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from esm_turbo.config import Backend
from esm_turbo.files.fingerprint import same_model
from esm_turbo.kv.append import Append
from esm_turbo.kv.tensors import Axis, axis_of, dim_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.projections import fused_projections
from esm_turbo.ops.backends import KVBackend, resolve_backend

__all__ = ["CapturedExtension", "StaticKVCache"]

# A protein has one <cls> and at most one <eos>.
_SLOTS = 2
_WARM_UPS = 3


class StaticKVCache(TurboKVCache):
    """Contexts in tensors that stay where they are: of as many columns as asked for, whatever the contexts' lengths.

    It can be read, and loaded with other contexts (`copy_`); nothing can be appended to it. Masks over the past have
    all its columns.

    Attributes:
        backend: of the model that reads it.
    """

    backend: KVBackend

    # What is made here is written into later, in whatever mode.
    @classmethod
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def like(cls, cache: TurboKVCache, columns: int | None = None, backend: KVBackend | None = None) -> Self:
        """Room for contexts like those of a cache, and a copy of these.

        Args:
            cache: claimed by a model, with at least one row.
            columns: of the longest context there will be; the cache's own for None.
            backend: of the model that will read it; None for the one that `auto` chooses.

        Raises:
            ValueError: the cache is empty or unclaimed, or has more columns.
        """
        if cache.codec is None or not cache.batch_size:
            raise ValueError("a static cache is made from a context: the cache is empty, or no model has claimed it")
        columns = cache.columns if columns is None else columns
        if columns < cache.columns:
            raise ValueError(f"`columns` must be at least the context's {cache.columns}, got {columns}")
        sizes = {Axis.COLUMN: columns, Axis.SLOT: _SLOTS if cache.config.protect_special_tokens else 0}
        tensors = {name: _room(name, tensor, sizes) for name, tensor in cache.named_tensors()}
        made = cls.from_tensors(cache.config, cache.geometry, cache.fingerprint, cache.codec, tensors)
        made.backend = resolve_backend(Backend.AUTO, cache.device) if backend is None else backend
        made.copy_(cache)
        return made

    def copy_(self, cache: TurboKVCache) -> None:
        """Loads other contexts: as many rows of the same kind, none of them longer than there is room for.

        Raises:
            ValueError: they are of another kind, another model's, too many, too few or too long.
        """
        same = cache.codec is self.codec and cache.config == self.config
        if not same or not same_model(cache.fingerprint, self.fingerprint):
            raise ValueError("the contexts must be the same model's, and stored under the same options and calibration")
        if cache.batch_size != self.batch_size or cache.columns > self.columns:
            raise ValueError(
                f"there is room for {self.batch_size} rows of up to {self.columns} columns, got {cache.batch_size} of"
                f" {cache.columns}"
            )
        slots = cache.protected_columns.shape[1]
        if (cache.positions is None) != (self.positions is None) or slots > self.protected_columns.shape[1]:
            raise ValueError("the contexts must agree in whether positions are stored, and protect two tokens at most")
        own, given = dict(self.named_tensors()), dict(cache.named_tensors())
        if own.keys() != given.keys():
            raise ValueError("only some of the contexts have lost their refinements (drop_refinements)")
        # Everything is checked by now.
        self.protected_columns.fill_(-1)
        for name, tensor in given.items():
            held = own[name]
            if axis_of(name) is not Axis.ROW:
                held = held.narrow(dim_of(name), 0, tensor.shape[dim_of(name)])
            held.copy_(tensor)
        assert self.codec is not None
        self.backend.refresh_protected(self.codec, [layer.protected for layer in self.layers])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """The number of columns: the contexts' own lengths are known to the device alone."""
        return self.columns

    def plan_append(self, *args: Any, **kwargs: Any) -> Append:
        raise ValueError("nothing can be appended to a static cache")

    def _changed(self, at_most: int | None = None) -> None:
        """Keeps the tensors, whatever the lengths."""


def _room(name: str, tensor: Tensor, sizes: dict[Axis, int]) -> Tensor:
    """Zeros in the shape of a cache's tensor, with other numbers of columns and slots."""
    shape = list(tensor.shape)
    if (axis := axis_of(name)) in sizes:
        shape[dim_of(name)] = sizes[axis]
    return tensor.new_zeros(shape)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a CUDA device, the model is on {device}")


class CapturedExtension:
    """Extensions of one shape, captured as a CUDA graph once and replayed for any tokens and any contexts.

    It reads the model's parameters where they lay when it was made, and keeps them: what is written into them is seen,
    what replaces them (`model.to`, `load_state_dict` with `assign`) is not; make another one then. The first one of a
    model moves its parameters (`fused_projections`): graphs of your own that read them must be captured after it.

    Args:
        model: `TurboEsmModel` or `TurboEsmForMaskedLM` on a CUDA device.
        context: one row for each of the extension's, or one that they share. It is copied, see `copy_`.
        num_new_tokens: n, of every row.
        batch_size: B, rows of the extension; the context's for None.
        columns: of the longest context that will be loaded; the context's own for None.
        masked: whether calls give an `attention_mask`.
        **kwargs: of the model's forward, such as `output_hidden_states`.

    Attributes:
        cache: the contexts, as the graph reads them.
        output: what the last call returned.

    Raises:
        ValueError: the model is not on a CUDA device, or the context does not fit.
    """

    # What is made here is written into later, in whatever mode.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        context: TurboKVCache,
        num_new_tokens: int,
        batch_size: int | None = None,
        *,
        columns: int | None = None,
        masked: bool = False,
        **kwargs: Any,
    ) -> None:
        device: torch.device = model.device
        _check_device(device)
        batch_size = context.batch_size if batch_size is None else batch_size
        model.claim_cache(context)
        self.cache = StaticKVCache.like(context, columns, model.kv_backend)
        self._input_ids = torch.full((batch_size, num_new_tokens), model.config.mask_token_id, device=device)
        seen = self.cache.columns + num_new_tokens
        self._mask = torch.ones(batch_size, seen, dtype=torch.int64, device=device) if masked else None
        options = {"past_key_values": self.cache, **kwargs}
        with fused_projections(model) as fused:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # Kernels are compiled, and what is made once is made.
                for _ in range(_WARM_UPS):
                    model(self._input_ids, self._mask, **options)
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = model(self._input_ids, self._mask, **options)
            # A graph knows addresses alone.
            self._read = [fused, kwargs, *(x.detach() for x in (*model.parameters(), *model.buffers()))]

    def copy_(self, context: TurboKVCache) -> None:
        """Loads other contexts for the calls that follow, see `StaticKVCache.copy_`."""
        self.cache.copy_(context)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Extends the contexts.

        Args:
            input_ids: [B, n].
            attention_mask: [B, n], or [B, columns + n] with all columns of the cache; None for all tokens. Only where
                the graph was captured with `masked`.

        Returns:
            The model's output. Its tensors are written into again by the next call: clone what is to stay.

        Raises:
            ValueError: a shape is another than captured, there is a mask that was not, or ids are no whole numbers.
        """
        if input_ids.shape != self._input_ids.shape:
            raise ValueError(f"captured for `input_ids` {list(self._input_ids.shape)}, got {list(input_ids.shape)}")
        if input_ids.is_floating_point():
            raise ValueError(f"`input_ids` must be whole numbers, got {input_ids.dtype}")
        self._input_ids.copy_(input_ids)
        if self._mask is not None:
            self._mask.fill_(1)
            if attention_mask is not None:
                whole = attention_mask.shape == self._mask.shape
                if not whole and attention_mask.shape != input_ids.shape:
                    raise ValueError(
                        f"`attention_mask` must be {list(self._input_ids.shape)} or {list(self._mask.shape)}, got"
                        f" {list(attention_mask.shape)}"
                    )
                self._mask[:, -attention_mask.shape[1] :].copy_(attention_mask != 0)
        elif attention_mask is not None:
            raise ValueError("captured without masks: make it with masked=True")
        self._graph.replay()
        return self.output
