"""Calls of a model that are captured as CUDA graphs: each has inputs of its own, loaded before a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex, StaticRowIndex, of_rows
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.buckets import Bucket
from esm_turbo.model.graphs import StaticKVCache, weights_of
from esm_turbo.model.packing import Packing
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.ops.copies import Rows

_WARM_UPS = 2


class ExtensionGraph:
    """An extension of one bucket.

    Args:
        executor: `Executor` that runs it.
        contexts: read by the graph.
        bucket: shapes.
        memory: handle of the memory that graphs share.
    """

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, executor: Any, contexts: StaticKVCache, bucket: Bucket, memory: Any) -> None:
        device = executor.encoder.device
        self.contexts = contexts
        # Padding is a token that is not a mask: a row of masks alone has no scale in token dropout.
        self._padding = executor.encoder.special_ids[0]
        self._input_ids = torch.full((bucket.rows, bucket.tokens), self._padding, device=device)
        self._mask = torch.ones(bucket.rows, contexts.columns + bucket.tokens, dtype=torch.bool, device=device)
        self._position_ids = torch.zeros(bucket.rows, bucket.tokens, dtype=torch.int64, device=device)
        self._index = StaticRowIndex(bucket.rows, bucket.contexts) if bucket.named else None

        def run() -> Tensor:
            inputs = ForwardInputs(self._input_ids, self._mask, self._position_ids, context_index=self._index)
            states: Tensor = executor.run(executor.plan(inputs, contexts)).last_hidden_state
            return states

        self.replay = capture(run, device, memory)
        self._read = [executor.kv.codec(contexts.config), *weights_of(executor.encoder)]

    def load(
        self,
        cache: TurboKVCache,
        rows: Rows,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        index: RowIndex | None,
    ) -> None:
        """Loads contexts and the inputs of a call."""
        batch_size, n = input_ids.shape
        past = self.contexts.columns
        self.contexts.load_(cache, rows)
        self._input_ids.fill_(self._padding)
        self._input_ids[:batch_size, :n] = input_ids
        self._position_ids[:batch_size, :n] = position_ids
        if self._index is not None:
            assert index is not None
            self._index.load(index)
        self._mask[:, :past] = of_rows(self.contexts.valid(), self._index)
        self._mask[:, past:] = 1
        self._mask[:batch_size, past + n :] = 0
        if attention_mask is not None:
            self._mask[:batch_size, past : past + n] = attention_mask[:, -n:]
            given = attention_mask.shape[1] - n
            self._mask[:batch_size, :given] = attention_mask[:, :given]


class PrefillGraph:
    """A prefill of one row of up to so many tokens.

    Args:
        executor: `Executor` that runs it.
        cache: empty; says how contexts are stored.
        tokens: of the longest row.
        memory: handle of the memory that graphs share.

    Attributes:
        contexts: what the graph encodes; overwritten by the next replay.
    """

    contexts: TurboKVCache

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, executor: Any, cache: TurboKVCache, tokens: int, memory: Any) -> None:
        device = executor.encoder.device
        self._padding = executor.encoder.special_ids[0]
        self._input_ids = torch.full((1, tokens), self._padding, device=device)
        self._mask = torch.ones(1, tokens, dtype=torch.int64, device=device)
        self._counts = (torch.full((1,), tokens, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        # The row, and its padding as another one.
        self._offsets = torch.tensor([0, tokens, tokens], dtype=torch.int32, device=device)
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        packing = Packing(1, tokens, tokens, positions, self._offsets, None, None)

        def run() -> Tensor:
            self.contexts = TurboKVCache(cache.config, cache.geometry, cache.fingerprint, cache.codec, device)
            output = executor.fill(self.contexts, self._input_ids, self._mask, packing, self._counts)
            states: Tensor = output.last_hidden_state
            return states

        self.replay = capture(run, device, memory)
        self._read = [cache.codec, *weights_of(executor.encoder)]

    def load(self, input_ids: Tensor, token_counts: tuple[Tensor, Tensor]) -> None:
        """Loads the inputs of a call."""
        n = input_ids.shape[1]
        self._input_ids.fill_(self._padding)
        self._input_ids[:, :n] = input_ids
        self._mask[:, :n] = 1
        self._mask[:, n:] = 0
        self._offsets[1] = n
        for own, given in zip(self._counts, token_counts, strict=True):
            own.copy_(given)


class DecodingGraph:
    """Contexts at full precision.

    Args:
        executor: `Executor` of the model whose contexts they are.
        contexts: read by the graph.
        memory: handle of the memory that graphs share.

    Attributes:
        decoded: what the graph writes; overwritten by the next replay.
    """

    decoded: TurboKVCache

    # These tensors are written into later, in any mode, which inference tensors do not allow.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, executor: Any, contexts: StaticKVCache, memory: Any) -> None:
        self.contexts = contexts

        def run() -> Tensor:
            self.decoded = executor.kv.decode(contexts)
            return self.decoded.lengths

        self.replay = capture(run, executor.encoder.device, memory)
        self._read = executor.kv.codec(contexts.config)


def capture(run: Callable[[], Tensor], device: torch.device, memory: Any) -> Callable[[], Tensor]:
    """Captures a computation; the result replays it and returns the same tensor every time.

    It keeps `run` with all that it refers to, since the graph knows only addresses.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Compiles kernels and fills caches.
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
        output = run()

    def replay(run: Callable[[], Tensor] = run) -> Tensor:
        graph.replay()
        return output

    return replay
