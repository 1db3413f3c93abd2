"""`CapturedExtension`, a CUDA graph that the user captures, and the static cache that all graphs read.

`graph_pool` captures calls that recur by itself; what it captures is in `captured`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from esm_turbo.files.fingerprint import same_model
from esm_turbo.kv.append import Append
from esm_turbo.kv.tensors import LAYER_TENSORS, OWN_TENSORS, Axis, axis_of, dim_of
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.projections import fused_projections
from esm_turbo.ops.copies import Rows, copy_rows

__all__ = ["CapturedExtension", "StaticKVCache"]

# A protein has one <cls> and at most one <eos>.
PROTECTED_SLOTS = 2
_WARM_UPS = 3


class StaticKVCache(TurboKVCache):
    """A cache in tensors with fixed addresses and fixed numbers of rows and columns, for graphs to read.

    Other contexts can be loaded into it (`copy_`); nothing can be appended to it. Masks over the past have all columns,
    whatever the lengths of the contexts.
    """

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @classmethod
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def like(cls, cache: TurboKVCache, columns: int | None = None, rows: int | None = None) -> Self:
        """Allocates a static cache for contexts like those of a cache, and copies these into it.

        Args:
            cache: claimed by a model, with at least one row.
            columns: length of the longest context to come; None for the columns of `cache`.
            rows: most contexts to come; None for the rows of `cache`.

        Raises:
            ValueError: the cache is empty or unclaimed, or has more columns.
        """
        if cache.codec is None or not cache.batch_size:
            raise ValueError("a static cache needs a context: the cache is empty, or no model has claimed it")
        columns = cache.columns if columns is None else columns
        if columns < cache.columns:
            raise ValueError(f"`columns` must be at least the context's {cache.columns}, got {columns}")
        sizes = {Axis.COLUMN: columns, Axis.SLOT: PROTECTED_SLOTS if cache.config.protect_special_tokens else 0}
        rows = cache.batch_size if rows is None else rows
        tensors = {
            name: _zeros(name, tensor, rows, sizes) for name, tensor in cache.named_tensors() if name != "chains"
        }
        made = cls.from_tensors(cache.config, cache.geometry, cache.fingerprint, cache.codec, tensors)
        made.copy_(cache)
        return made

    def copy_(self, cache: TurboKVCache) -> None:
        """Loads other contexts of the same model and options. Rows beyond theirs become empty.

        Raises:
            ValueError: they are of another model or stored otherwise, too many or too long.
        """
        same = cache.codec is self.codec and cache.config == self.config
        if not same or not same_model(cache.fingerprint, self.fingerprint):
            raise ValueError("the contexts must be of the same model, options and calibration")
        if cache.batch_size > self.batch_size or cache.columns > self.columns:
            raise ValueError(
                f"there is room for {self.batch_size} rows of up to {self.columns} columns, got {cache.batch_size} of"
                f" {cache.columns}"
            )
        slots = cache.protected_columns.shape[1]
        if (cache.positions is None) != (self.positions is None) or slots > self.protected_columns.shape[1]:
            raise ValueError("all contexts or none must store positions, and each may protect two tokens at most")
        names, rows = layer_rows(cache)
        if names != layer_rows(self)[0]:
            raise ValueError("refinements were dropped (drop_refinements) from some of the contexts only")
        # All checks are done: a refused cache must change nothing.
        self.load_(cache, rows)

    def load_(self, cache: TurboKVCache, rows: Rows) -> None:
        """Loads contexts that are known to fit; `rows` are those of their layers."""
        # The model may have noticed changes of its weights since.
        self.fingerprint = cache.fingerprint
        self.lengths.zero_()
        self.protected_columns.fill_(-1)
        for name in OWN_TENSORS:
            given = getattr(cache, name)
            # Which chains a token sees is in the masks.
            if given is not None and name != "chains":
                getattr(self, name)[tuple(map(slice, given.shape))] = given
        copy_rows(rows, layer_rows(self)[1])

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Number of columns. Lengths are known to the device only."""
        return self.columns

    def plan_append(self, *args: Any, **kwargs: Any) -> Append:
        raise ValueError("nothing can be appended to a static cache")

    def _changed(self, at_most: int | None = None) -> None:
        """Keeps all columns and slots."""


def layer_rows(cache: TurboKVCache) -> tuple[tuple[str, ...], Rows]:
    """Names, with dtypes, and rows of the tensors of a cache's layers; described once while they stay the same."""
    tensors = [x for layer in cache.layers for group in LAYER_TENSORS for x in getattr(layer, group).values()]

    def make() -> tuple[tuple[tuple[str, ...], Rows], bool]:
        named = [(name, tensor) for name, tensor in cache.named_tensors() if name not in OWN_TENSORS]
        rows = Rows(tensors, [dim_of(name) for name, _ in named])
        return (tuple(f"{name} {tensor.dtype}" for name, tensor in named), rows), rows.copied

    return cache.described("rows", tensors, make)


def weights_of(model: Any) -> list[Tensor]:
    """What a graph of the model reads and must keep alive, since it knows only addresses."""
    return [x.detach() for x in (*model.parameters(), *model.buffers())]


def _zeros(name: str, tensor: Tensor, rows: int, sizes: dict[Axis, int]) -> Tensor:
    """Zeros in the shape of a cache's tensor, with other numbers of rows, columns and slots."""
    shape = [rows, *tensor.shape[1:]]
    if (axis := axis_of(name)) in sizes:
        shape[dim_of(name)] = sizes[axis]
    return tensor.new_zeros(shape)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a CUDA device, the model is on {device}")


class CapturedExtension:
    """Extensions of one shape, captured once as a CUDA graph and replayed for any tokens and any contexts.

    The graph reads the model's parameters at the addresses they had at capture, and keeps them alive. It sees values
    written into them, but not new tensors in their place (`model.to`, `load_state_dict` with `assign`): capture again
    then. The first capture of a model moves its parameters (`fused_projections`): other graphs that read them must be
    captured after it.

    Args:
        model: a `CachedModel`, or a model with a head and one, on a CUDA device.
        context: one row for each of the extension's, or one that they share. It is copied, see `copy_`.
        num_new_tokens: n, per row.
        batch_size: B, rows of the extension; None for the context's.
        columns: length of the longest context to be loaded; None for the context's columns.
        masked: whether calls pass an `attention_mask`.
        **kwargs: of the model's forward, such as `output_hidden_states`.

    Attributes:
        cache: the contexts that the graph reads.
        output: return value of the last call.

    Raises:
        ValueError: the model is not on a CUDA device, or the context does not fit.
    """

    # These tensors are written into later, in any mode, which inference tensors do not allow.
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
        if kwargs.get("context_index") is not None:
            raise ValueError("rows cannot name their contexts in a graph by hand: give a context for each row")
        _check_device(device)
        batch_size = context.batch_size if batch_size is None else batch_size
        model.claim_cache(context)
        self.cache = StaticKVCache.like(context, columns)
        self._input_ids = torch.full((batch_size, num_new_tokens), model.config.mask_token_id, device=device)
        seen = self.cache.columns + num_new_tokens
        self._mask = torch.ones(batch_size, seen, dtype=torch.int64, device=device) if masked else None
        options = {"past_key_values": self.cache, **kwargs}
        with fused_projections(model) as fused:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # Compiles kernels and fills caches.
                for _ in range(_WARM_UPS):
                    model(self._input_ids, self._mask, **options)
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = model(self._input_ids, self._mask, **options)
            self._read = [fused, kwargs, *weights_of(model)]

    def copy_(self, context: TurboKVCache) -> None:
        """Loads other contexts for the calls that follow, as many as before, see `StaticKVCache.copy_`."""
        if context.batch_size != self.cache.batch_size:
            raise ValueError(f"captured for {self.cache.batch_size} contexts, got {context.batch_size}")
        self.cache.copy_(context)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Extends the contexts.

        Args:
            input_ids: [B, n].
            attention_mask: [B, n], or [B, columns + n] with all columns of the cache; None for all tokens. Only if
                captured with `masked`.

        Returns:
            The model's output. The next call overwrites its tensors: clone what you keep.

        Raises:
            ValueError: a shape differs from the captured one, there is a mask and none was captured, or ids are not
                integers.
        """
        if input_ids.shape != self._input_ids.shape:
            raise ValueError(f"captured for `input_ids` {list(self._input_ids.shape)}, got {list(input_ids.shape)}")
        if input_ids.is_floating_point():
            raise ValueError(f"`input_ids` must be integers, got {input_ids.dtype}")
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
            raise ValueError("captured without masks: capture with masked=True")
        self._graph.replay()
        return self.output
