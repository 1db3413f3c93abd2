"""Extensions and short prefills that recur are captured as CUDA graphs, and replayed for any tokens and contexts.

With few tokens a forward takes the host several times as long to launch as the device to compute. A graph is launched
as a whole. Its shapes are fixed: a call is padded to the next bucket of shapes. The contexts of an extension are copied
into the graph's own, and those that a prefill encodes are cut out of the graph's, in one launch each.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model import captured
from esm_turbo.model.buckets import (
    MAX_COLUMNS,
    MAX_GROWING_TOKENS,
    MIN_COLUMNS,
    Bucket,
    bucket_of,
    rounded_up,
    rounded_up_growing_rows,
)
from esm_turbo.model.captured import DecodingGraph, ExtensionGraph, PrefillGraph
from esm_turbo.model.graphs import StaticKVCache, layer_rows
from esm_turbo.model.growth import Growth, StepKind

# Capturing takes as long as about ten calls.
_USES_BEFORE_CAPTURE = 2
# Rows that name their contexts come from many requests at once, in many shapes, few of which recur soon.
_USES_BEFORE_CAPTURE_NAMED = 10
# Uses before a graph that had to go is captured again, so that shapes in turn do not spend their time on captures.
_USES_BEFORE_RECAPTURE = 10
# A service meets a few dozen shapes.
_MAX_GRAPHS = 64
# Fraction of a device's memory that contexts and results of graphs may take.
_MEMORY_SHARE = 0.05
# One capture at a time, in whichever thread and of whichever model.
_capturing = threading.Lock()


class GraphPool:
    """The graphs of a model. They are dropped when its parameters move, least recently used ones when they get many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._clear()

    def clear(self) -> None:
        """Drops all graphs and their memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._finish()
        self._graphs: OrderedDict[Any, ExtensionGraph | PrefillGraph | DecodingGraph | Growth] = OrderedDict()
        self._uses: Counter[Any] = Counter()
        self._addresses: tuple[int, ...] = ()
        self._memory: Any = None
        self._done = None

    # Copies of a model capture their own.
    def __deepcopy__(self, memo: object) -> GraphPool:
        return GraphPool()

    def __reduce__(self) -> tuple[type[GraphPool], tuple[()]]:
        return GraphPool, ()

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.no_grad()
    def extend(
        self,
        executor: Any,
        addresses: tuple[int, ...],
        cache: TurboKVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        uses: int = 1,
        index: RowIndex | None = None,
    ) -> Tensor | None:
        """The last hidden states of an extension, by a graph if there is one or if the call has recurred.

        Args:
            executor: of a model on a CUDA device.
            addresses: of the model's parameters, see `plain_addresses`.
            cache: the contexts, claimed by the model.
            input_ids: [batch, n].
            attention_mask: as in the model's forward.
            position_ids: [batch, n] or [1, n].
            uses: number of calls that this one counts for; a call that is known to recur counts more.
            index: row of the cache that each row reads; None if they are the same, or one that all share.

        Returns:
            [batch, n, hidden_size]; None if there is no graph for it, or if the mask has another shape.
        """
        batch_size, n = input_ids.shape
        if attention_mask is not None and not _is_mask_of(attention_mask, input_ids, cache):
            return None
        bucket = bucket_of(batch_size, n, cache.batch_size, cache.columns, index is not None)
        if bucket is None:
            return None
        order = None
        if index is not None:
            index, order = index.grouped(input_ids.device)
        if order is not None:
            input_ids, position_ids = input_ids[order], position_ids.expand(batch_size, -1)[order]
            attention_mask = None if attention_mask is None else attention_mask[order]
        names, source = layer_rows(cache)
        layout = (id(cache.codec), names, cache.positions is None)

        def make(memory: Any) -> ExtensionGraph:
            return ExtensionGraph(executor, self._contexts(bucket, cache, layout), bucket, memory)

        before = _USES_BEFORE_CAPTURE_NAMED if bucket.named else _USES_BEFORE_CAPTURE
        with self._graph((bucket, *layout), executor.encoder.device, addresses, uses, make, before) as graph:
            if graph is None:
                return None
            graph.load(cache, source, input_ids, attention_mask, position_ids, index)
            states: Tensor = graph.replay()[:batch_size, :n]
            return states.clone() if order is None else states[order.argsort()]

    @torch.no_grad()
    def prefill(
        self,
        executor: Any,
        addresses: tuple[int, ...],
        cache: TurboKVCache,
        input_ids: Tensor,
        token_counts: tuple[Tensor, Tensor],
        uses: int = 1,
    ) -> tuple[Tensor, TurboKVCache] | None:
        """The last hidden states of a single row, and its context, by a graph like those of `extend`.

        Args:
            executor: of a model on a CUDA device.
            addresses: of the model's parameters, see `plain_addresses`.
            cache: empty; says how the context is stored.
            input_ids: [1, n], without padding.
            token_counts: number of tokens and of masks in the whole input, [1] each.
            uses: number of calls that this one counts for.

        Returns:
            [1, n, hidden_size], and a cache; None if there is no graph for it.
        """
        n = input_ids.shape[1]
        bucket = bucket_of(1, n, 1, n)
        if bucket is None:
            return None

        def make(memory: Any) -> PrefillGraph:
            return PrefillGraph(executor, cache, bucket.columns, memory)

        key = (bucket.columns, id(cache.codec), cache.config)
        with self._graph(key, executor.encoder.device, addresses, uses, make) as graph:
            if graph is None:
                return None
            graph.load(input_ids, token_counts)
            states = graph.replay()[:, :n].clone()
            return states, graph.contexts.cut([n])[0]

    @torch.no_grad()
    def decode(
        self, executor: Any, addresses: tuple[int, ...], cache: TurboKVCache, uses: int = 1
    ) -> TurboKVCache | None:
        """A context of one row at full precision, by a graph like those of `extend`; None if there is none for it.

        Args:
            executor: of a model on a CUDA device.
            addresses: of the model's parameters, see `plain_addresses`.
            cache: of one row, claimed by the model.
            uses: number of calls that this one counts for.
        """
        n = cache.get_seq_length()
        bucket = bucket_of(1, 1, 1, max(n, cache.columns))
        if bucket is None:
            return None
        names, source = layer_rows(cache)
        layout = (id(cache.codec), names, cache.positions is None)

        def make(memory: Any) -> DecodingGraph:
            return DecodingGraph(executor, self._contexts(bucket, cache, layout), memory)

        with self._graph((bucket.columns, *layout), executor.encoder.device, addresses, uses, make) as graph:
            if graph is None:
                return None
            graph.contexts.load_(cache, source)
            graph.replay()
            decoded: TurboKVCache = graph.decoded.cut([n])[0]
            decoded.fingerprint = cache.fingerprint
            return decoded

    @contextmanager
    def growing(
        self,
        executor: Any,
        addresses: tuple[int, ...],
        cache: TurboKVCache,
        kinds: Sequence[StepKind],
        columns: int,
        uses: int = 1,
    ) -> Iterator[Growth | None]:
        """Rows that grow by graphs, for the caller alone; None if there are none. Others may use the pool meanwhile.

        Args:
            executor: of a model on a CUDA device.
            addresses: of the model's parameters, see `plain_addresses`.
            cache: claimed by the model: how rows are stored, and their number.
            kinds: of the steps to come.
            columns: of the longest row to come, and one for the mask after it.
            uses: number of calls that this one counts for.
        """
        device = executor.encoder.device
        rows, columns = (
            rounded_up_growing_rows(cache.batch_size),
            rounded_up(max(columns, cache.columns), MIN_COLUMNS),
        )
        share = rows / cache.batch_size * columns / max(1, cache.columns)
        too_large = share * sum(tensor.nbytes for _, tensor in cache.named_tensors()) > _memory_limit(device)
        if too_large or columns > MAX_COLUMNS or rows * max(kind.tokens for kind in kinds) > MAX_GROWING_TOKENS:
            yield None
            return

        def make(memory: Any) -> Growth:
            return Growth(executor, cache, rows, columns, kinds, lambda run: captured.capture(run, device, memory))

        key = (Growth, rows, columns, tuple(kinds), id(cache.codec), layer_rows(cache)[0], cache.positions is None)
        with self._lock:
            growth: Growth | None = self._find(key, device, addresses, uses, make)
            self._graphs.pop(key, None)
        if growth is None:
            yield None
            return
        growth.alone = partial(self._alone, device)
        try:
            with self._alone(device):
                # What the last caller wrote is there.
                pass
            yield growth
        finally:
            with self._lock:
                with self._exclusive(device):
                    # And what this one wrote, before anything is dropped or handed on.
                    pass
                if addresses == self._addresses and key not in self._graphs:
                    self._graphs[key] = growth
                    self._shrink(device)
                else:
                    self._finish()

    @contextmanager
    def _alone(self, device: torch.device) -> Iterator[None]:
        """For a replay outside `_graph`."""
        with self._lock, self._exclusive(device):
            yield

    @contextmanager
    def _graph(
        self,
        key: Any,
        device: torch.device,
        addresses: tuple[int, ...],
        uses: int,
        make: Callable[[Any], Any],
        before: int = _USES_BEFORE_CAPTURE,
    ) -> Iterator[Any]:
        """The graph of a key, made once it was used `before` times, for the caller alone; None if there is none."""
        with self._lock:
            graph = self._find(key, device, addresses, uses, make, before)
            if graph is None:
                yield None
                return
            with self._exclusive(device):
                yield graph

    def _find(
        self,
        key: Any,
        device: torch.device,
        addresses: tuple[int, ...],
        uses: int,
        make: Callable[[Any], Any],
        before: int = _USES_BEFORE_CAPTURE,
    ) -> Any:
        """See `_graph`; to be called with the lock held."""
        if addresses != self._addresses:
            self._clear()
            self._addresses = addresses
        if key not in self._graphs:
            self._uses[key] += uses
            if self._uses[key] >= before:
                self._capture(key, device, make)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def _capture(self, key: Any, device: torch.device, make: Callable[[Any], Any]) -> None:
        """Adds the graph of a key, unless it cannot be made; then it is not tried again."""
        try:
            with _capturing:
                self._graphs[key] = make(self._shared_memory())
        except RuntimeError as error:
            # Graphs of other shapes may still fit.
            self._uses[key] = -(2**62)
            warnings.warn(
                f"a forward could not be captured as a CUDA graph and runs uncaptured: {str(error).splitlines()[0]}",
                stacklevel=2,
            )
            return
        self._shrink(device)

    def _shrink(self, device: torch.device) -> None:
        """Drops the graphs that have been used least recently, as long as there are too many."""
        limit = _memory_limit(device)
        while len(self._graphs) > _MAX_GRAPHS or (len(self._graphs) > 1 and self._bytes() > limit):
            self._finish()
            dropped, _ = self._graphs.popitem(last=False)
            self._uses[dropped] = _USES_BEFORE_CAPTURE - _USES_BEFORE_RECAPTURE

    def _contexts(self, bucket: Bucket, cache: TurboKVCache, layout: Any) -> StaticKVCache:
        """Static contexts for a graph, shared by all graphs with as many of the same length and layout."""
        for (other, *own_layout), graph in self._graphs.items():
            if isinstance(graph, ExtensionGraph) and other[2:4] == bucket[2:4] and tuple(own_layout) == layout:
                # Those of a model whose weights have changed would be refused.
                graph.contexts.fingerprint = cache.fingerprint
                return graph.contexts
        return StaticKVCache.like(cache, bucket.columns, bucket.contexts)

    def _shared_memory(self) -> Any:
        # Graphs are replayed one after the other, so that one may use the memory of another.
        if self._memory is None and torch.cuda.is_available():
            self._memory = torch.cuda.graph_pool_handle()
        return self._memory

    def _bytes(self) -> int:
        """Bytes of all contexts, also of decoded ones."""
        caches = [graph.contexts for graph in self._graphs.values()]
        caches += [graph.decoded for graph in self._graphs.values() if isinstance(graph, DecodingGraph)]
        tensors = {id(tensor): tensor for cache in caches for _, tensor in cache.named_tensors()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _finish(self) -> None:
        """Waits for the last replay: what it reads may be freed then, whatever the stream."""
        if self._done is not None:
            self._done.synchronize()

    @contextmanager
    def _exclusive(self, device: torch.device) -> Iterator[None]:
        """Waits until the last replay, on whatever stream, is done with what graphs share."""
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        if self._done is None:
            self._done = torch.cuda.Event()
        else:
            stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)


def _is_mask_of(attention_mask: Tensor, input_ids: Tensor, cache: TurboKVCache) -> bool:
    """Whether a mask is [batch, n], or [batch, past + n]."""
    batch_size, n = input_ids.shape
    return attention_mask.shape == input_ids.shape or (attention_mask.shape == (batch_size, cache.get_seq_length() + n))


def _memory_limit(device: torch.device) -> int:
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(total * _MEMORY_SHARE)
