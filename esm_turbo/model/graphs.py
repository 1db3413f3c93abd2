"""Calls that recur are captured as CUDA graphs, and replayed for any tokens and contexts.

With few tokens a forward takes the host several times as long to launch as the device to compute. A graph is launched
as a whole. Its shapes are fixed: a call is padded to the next bucket of shapes. The contexts of an extension are copied
into the graph's own, and those that a prefill encodes are cut out of the graph's, in one launch each.
"""

from __future__ import annotations

import gc
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex, StaticRowIndex, of_rows
from esm_turbo.files.identity import seen_code
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.growth import Growth, StepKind, StepRunner
from esm_turbo.model.packing import Packing
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.model.projections import MOVING
from esm_turbo.model.static_cache import StaticKVCache, layer_rows
from esm_turbo.ops.copies import ByteRows

# Capturing takes as long as about ten calls.
_USES_BEFORE_CAPTURE = 2
# Rows that name their contexts come from many requests at once, in many shapes, few of which recur soon.
_USES_BEFORE_CAPTURE_NAMED = 10
# Uses before a graph that had to go is captured again, so that shapes in turn do not spend their time on captures.
_USES_BEFORE_RECAPTURE = 10
# A service meets a few dozen shapes.
_MOST_GRAPHS = 64
# Fraction of a device's memory that contexts and results of graphs may take.
_MEMORY_SHARE = 0.05
_WARM_UPS = 2
# With more tokens the device takes longer than the host, and padding costs more than a graph saves.
_MAX_TOKENS = 4096
_MAX_COLUMNS = 4096
# A step that grows rows launches more and computes less.
_MAX_GROWING_TOKENS = 16384
_MIN_ROWS, _MIN_TOKENS, _MIN_COLUMNS = 8, 8, 128

Capture = Callable[[Callable[[], Tensor], torch.device, Any], Callable[[], Tensor]]


class Bucket(NamedTuple):
    """Shapes of a graph: those of a call are padded to the next ones, so that few graphs serve many calls.

    Attributes:
        rows: of the extension, 1 or at least 8: fewer take as long as 8.
        tokens: per row.
        contexts: rows of the cache: `rows`, or 1 that all share, or up to `rows` that rows name.
        columns: of the cache.
        named: whether rows name their contexts.
    """

    rows: int
    tokens: int
    contexts: int
    columns: int
    named: bool = False

    @classmethod
    def of(cls, rows: int, tokens: int, contexts: int, columns: int, named: bool = False) -> Bucket | None:
        """The smallest bucket for these shapes; None if a graph would not make them faster."""
        if named and contexts > rows:
            # All contexts of a cache are copied.
            return None
        rows = 1 if rows == 1 else max(_MIN_ROWS, _power(rows, 2))
        tokens, columns = rounded_up(tokens, _MIN_TOKENS), rounded_up(columns, _MIN_COLUMNS)
        if rows * tokens > _MAX_TOKENS or columns > _MAX_COLUMNS:
            return None
        if named:
            return cls(rows, tokens, min(rows, _power(contexts, 4)), columns, named)
        return cls(rows, tokens, 1 if contexts == 1 else rows, columns)


def rounded_up(number: int, step: int) -> int:
    """The next multiple of `step` up to four of them, then the next power of two or one and a half times one."""
    if number <= 4 * step:
        return max(1, -(-number // step)) * step
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 else power


def _power(number: int, base: int) -> int:
    """The smallest power of `base` that is no less."""
    power = 1
    while power < number:
        power *= base
    return power


def growing_rows(rows: int) -> int:
    """Rows of a graph that grows: a power of two up to eight, then closer, as the device is what takes the time."""
    return _power(rows, 2) if rows <= _MIN_ROWS else rounded_up(rows, _MIN_ROWS)


def capture_graph(run: Callable[[], Tensor], device: torch.device, memory: Any) -> Callable[[], Tensor]:
    """Capture a computation; the result replays it and returns the same tensor every time.

    It keeps `run` with all that it refers to, since the graph knows only addresses.
    """
    # One with another priority than the streams of programs and of what runs beside: PyTorch hands out the same few.
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Compiles kernels and fills caches.
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    # A graph refers to itself by what it runs, so that the collector frees it, in any thread; that would end a capture.
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            output = run()
    finally:
        if collects:
            gc.enable()

    def replay(run: Callable[[], Tensor] = run) -> Tensor:
        graph.replay()
        return output

    return replay


class _Graph(ABC):
    """A captured call: inputs of its own, loaded before a replay.

    Attributes:
        contexts: what the graph reads or encodes.
        replay: runs it; the result is overwritten by the next replay.
        read: what must be kept alive.
    """

    contexts: TurboKVCache
    replay: Callable[[], Tensor]
    read: list[Any]

    @abstractmethod
    def run(self) -> Tensor:
        """Run the call; this is what is captured."""

    def capture(self, capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]) -> None:
        """Capture `run`."""
        self.replay = capture(self.run)

    @property
    def caches(self) -> list[TurboKVCache]:
        """All caches that the graph holds."""
        return [self.contexts]


class _ExtensionGraph(_Graph):
    """An extension of one bucket."""

    contexts: StaticKVCache

    def __init__(self, executor: StepRunner, contexts: StaticKVCache, bucket: Bucket) -> None:
        device = executor.encoder.device
        self.contexts = contexts
        # Padding is a token that is not a mask: a row of masks alone has no scale in token dropout.
        self._padding = executor.encoder.special_ids[0]
        self._input_ids = torch.full((bucket.rows, bucket.tokens), self._padding, device=device)
        self._mask = torch.ones(bucket.rows, contexts.columns + bucket.tokens, dtype=torch.bool, device=device)
        self._position_ids = torch.zeros(bucket.rows, bucket.tokens, dtype=torch.int64, device=device)
        self._index = StaticRowIndex(bucket.rows, bucket.contexts) if bucket.named else None
        self._inputs = ForwardInputs(self._input_ids, self._mask, self._position_ids, context_index=self._index)
        self._executor = executor

    def run(self) -> Tensor:
        states: Tensor = self._executor.run(self._executor.plan(self._inputs, self.contexts)).last_hidden_state
        return states

    def load(self, cache: TurboKVCache, rows: ByteRows, inputs: ForwardInputs, index: RowIndex | None) -> None:
        """Load contexts and the inputs of a call."""
        batch_size, n = inputs.ids.shape
        past, mask, positions = self.contexts.columns, inputs.attention_mask, inputs.position_ids
        assert positions is not None
        self.contexts.load_(cache, rows)
        self._input_ids.fill_(self._padding)
        self._input_ids[:batch_size, :n] = inputs.ids
        self._position_ids[:batch_size, :n] = positions
        if self._index is not None:
            assert index is not None
            self._index.load(index)
        self._mask[:, :past] = of_rows(self.contexts.valid(), self._index)
        self._mask[:, past:] = 1
        self._mask[:batch_size, past + n :] = 0
        if mask is not None:
            self._mask[:batch_size, past : past + n] = mask[:, -n:]
            given = mask.shape[1] - n
            self._mask[:batch_size, :given] = mask[:, :given]


class _PrefillGraph(_Graph):
    """A prefill of one row of up to so many tokens, stored as in an empty cache."""

    def __init__(self, executor: StepRunner, cache: TurboKVCache, tokens: int) -> None:
        device = executor.encoder.device
        self._padding = executor.encoder.special_ids[0]
        self._input_ids = torch.full((1, tokens), self._padding, device=device)
        self._mask = torch.ones(1, tokens, dtype=torch.int64, device=device)
        self._counts = (torch.full((1,), tokens, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        # The row, and its padding as another one.
        self._offsets = torch.tensor([0, tokens, tokens], dtype=torch.int32, device=device)
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        self._packing = Packing(1, tokens, tokens, positions, self._offsets, None, None)
        self._inputs = ForwardInputs(self._input_ids, self._mask, token_counts=self._counts)
        self._executor = executor
        self._like = (cache.config, cache.geometry, cache.identity, cache.codec, device)
        self.contexts = cache

    def run(self) -> Tensor:
        self.contexts = TurboKVCache(*self._like)
        states: Tensor = self._executor.fill(self.contexts, self._inputs, self._packing).last_hidden_state
        return states

    def load(self, inputs: ForwardInputs) -> None:
        """Load the inputs of a call."""
        n = inputs.ids.shape[1]
        self._input_ids.fill_(self._padding)
        self._input_ids[:, :n] = inputs.ids
        self._mask[:, :n] = 1
        self._mask[:, n:] = 0
        self._offsets[1] = n
        assert inputs.token_counts is not None
        for own, given in zip(self._counts, inputs.token_counts, strict=True):
            own.copy_(given)


class _DecodingGraph(_Graph):
    """Contexts at full precision.

    Attributes:
        decoded: what the graph writes; overwritten by the next replay.
    """

    decoded: TurboKVCache

    def __init__(self, executor: StepRunner, contexts: StaticKVCache) -> None:
        self.contexts = contexts
        self._executor = executor

    @property
    def caches(self) -> list[TurboKVCache]:
        return [self.contexts, self.decoded]

    def run(self) -> Tensor:
        self.decoded = self._executor.kv.decode(self.contexts)
        return self.decoded.lengths


class Caller(NamedTuple):
    """The model of a call.

    Attributes:
        executor: of a model on a CUDA device.
        addresses: of its parameters, see `plain_addresses`.
        uses: number of calls that this one counts for; a call that is known to recur counts more.
    """

    executor: StepRunner
    addresses: tuple[int, ...]
    uses: int = 1

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.executor.encoder.device
        return device


class GraphPool:
    """The graphs of a model. They are dropped when its parameters move, least recently used ones when they get many.

    Its methods take caches that the model has claimed, and answer None where there is no graph, and none is captured.

    Args:
        capture: captures a computation, and returns what replays it.
        most: graphs that are kept.
        memory_limit: bytes that contexts and results of graphs may take; None for a share of the device's.
    """

    def __init__(
        self, capture: Capture = capture_graph, most: int = _MOST_GRAPHS, memory_limit: int | None = None
    ) -> None:
        self.capture = capture
        self.most = most
        self.memory_limit = memory_limit
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._clear()

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._finish()
        self._graphs: OrderedDict[Any, _Graph | Growth] = OrderedDict()
        self._uses: Counter[Any] = Counter()
        self._addresses: tuple[int, ...] = ()
        self._memory: Any = None
        self._done = None

    # Copies of a model capture their own.
    def __deepcopy__(self, memo: object) -> GraphPool:
        return GraphPool(self.capture, self.most, self.memory_limit)

    def __reduce__(self) -> tuple[type[GraphPool], tuple[()]]:
        return GraphPool, ()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def caches(self) -> list[TurboKVCache]:
        """All caches that graphs hold."""
        return [cache for graph in self._graphs.values() for cache in graph.caches]

    @torch.no_grad()
    def extend(self, caller: Caller, cache: TurboKVCache, inputs: ForwardInputs) -> Tensor | None:
        """The last hidden states of an extension, [batch, n, hidden_size].

        Args:
            caller: the model.
            cache: the contexts.
            inputs: with `position_ids`, and contexts named by a `RowIndex` or not at all.
        """
        ids, index = inputs.ids, inputs.context_index
        assert index is None or isinstance(index, RowIndex)
        (batch_size, n), mask = ids.shape, inputs.attention_mask
        if mask is not None and mask.shape not in (ids.shape, (batch_size, cache.get_seq_length() + n)):
            return None
        bucket = Bucket.of(batch_size, n, cache.batch_size, cache.columns, index is not None)
        if bucket is None:
            return None
        order = None
        if index is not None:
            index, order = index.grouped(ids.device)
        if order is not None:
            inputs = inputs.in_order(order)
        names, source = layer_rows(cache)
        layout = (id(cache.codec), names, cache.positions is None)

        def make() -> _Graph:
            return _ExtensionGraph(caller.executor, self._contexts(bucket, cache, layout), bucket)

        before = _USES_BEFORE_CAPTURE_NAMED if bucket.named else _USES_BEFORE_CAPTURE
        with self._use((bucket, *layout), caller, make, before) as graph:
            if graph is None:
                return None
            graph.load(cache, source, inputs, index)
            states: Tensor = graph.replay()[:batch_size, :n]
            return states.clone() if order is None else states[order.argsort()]

    @torch.no_grad()
    def prefill(self, caller: Caller, cache: TurboKVCache, inputs: ForwardInputs) -> tuple[Tensor, TurboKVCache] | None:
        """The last hidden states of a single row, [1, n, hidden_size], and its context.

        Args:
            caller: the model.
            cache: empty; says how the context is stored.
            inputs: a row without padding, and its `token_counts`.
        """
        n = inputs.ids.shape[1]
        bucket = Bucket.of(1, n, 1, n)
        if bucket is None:
            return None

        def make() -> _Graph:
            return _PrefillGraph(caller.executor, cache, bucket.columns)

        key = (bucket.columns, id(cache.codec), cache.config)
        with self._use(key, caller, make) as graph:
            if graph is None:
                return None
            graph.load(inputs)
            states = graph.replay()[:, :n].clone()
            return states, graph.contexts.cut([n])[0]

    @torch.no_grad()
    def decode(self, caller: Caller, cache: TurboKVCache) -> TurboKVCache | None:
        """A context of one row at full precision."""
        n = cache.get_seq_length()
        bucket = Bucket.of(1, 1, 1, max(n, cache.columns))
        if bucket is None:
            return None
        names, source = layer_rows(cache)
        layout = (id(cache.codec), names, cache.positions is None)

        def make() -> _Graph:
            return _DecodingGraph(caller.executor, self._contexts(bucket, cache, layout))

        with self._use((bucket.columns, *layout), caller, make) as graph:
            if graph is None:
                return None
            graph.contexts.load_(cache, source)
            graph.replay()
            decoded: TurboKVCache = graph.decoded.cut([n])[0]
            decoded.identity = cache.identity
            return decoded

    @contextmanager
    def growing(
        self, caller: Caller, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int
    ) -> Iterator[Growth | None]:
        """Rows that grow by graphs, for the caller alone. Others may use the pool meanwhile.

        Args:
            caller: the model.
            cache: how rows are stored, and their number.
            kinds: of the steps to come.
            columns: of the longest row to come, and one for the mask after it.
        """
        device = caller.device
        rows, columns = growing_rows(cache.batch_size), rounded_up(max(columns, cache.columns), _MIN_COLUMNS)
        share = rows / cache.batch_size * columns / max(1, cache.columns)
        too_large = share * sum(tensor.nbytes for _, tensor in cache.named_tensors()) > self._limit(device)
        if too_large or columns > _MAX_COLUMNS or rows * max(kind.tokens for kind in kinds) > _MAX_GROWING_TOKENS:
            yield None
            return

        def make() -> Growth:
            return Growth(caller.executor, cache, rows, columns, kinds)

        key = (Growth, rows, columns, tuple(kinds), id(cache.codec), layer_rows(cache)[0], cache.positions is None)
        with self._lock:
            growth: Growth | None = self._find(key, caller, make)
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
                if caller.addresses == self._addresses and key not in self._graphs:
                    self._graphs[key] = growth
                    self._shrink(device)
                else:
                    self._finish()

    @contextmanager
    def _alone(self, device: torch.device) -> Iterator[None]:
        """For a replay outside `_use`."""
        with self._lock, self._exclusive(device):
            yield

    @contextmanager
    def _use(
        self, key: Any, caller: Caller, make: Callable[[], Any], before: int = _USES_BEFORE_CAPTURE
    ) -> Iterator[Any]:
        """The graph of a key, captured once it was used `before` times, for the caller alone; None if there is none."""
        with self._lock:
            graph = self._find(key, caller, make, before)
            if graph is None:
                yield None
                return
            with self._exclusive(caller.device):
                yield graph

    def _find(self, key: Any, caller: Caller, make: Callable[[], Any], before: int = _USES_BEFORE_CAPTURE) -> Any:
        """See `_use`; to be called with the lock held."""
        if caller.addresses != self._addresses:
            self._clear()
            self._addresses = caller.addresses
        if key not in self._graphs:
            self._uses[key] += caller.uses
            if self._uses[key] >= before:
                self._add(key, caller, make)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def _add(self, key: Any, caller: Caller, make: Callable[[], Any]) -> None:
        """Capture the graph of a key, unless it cannot be; then it is not tried again."""
        device, executor = caller.device, caller.executor
        known = seen_code(executor.encoder)
        if self._memory is None and torch.cuda.is_available():
            # Graphs are replayed one after the other, so that one may use the memory of another.
            self._memory = torch.cuda.graph_pool_handle()
        try:
            # Tensors are written into later, in any mode, which inference tensors do not allow.
            with MOVING, torch.inference_mode(mode=False), torch.no_grad():
                graph = make()
                graph.capture(lambda run: self.capture(run, device, self._memory))
                # The graph knows only addresses. Weights may have moved when they were fused, in the first run.
                encoder = executor.encoder
                weights = [x.detach() for x in (*encoder.parameters(), *encoder.buffers())]
                graph.read = [executor.kv.codec(graph.contexts.config), *weights]
            # The codec's model was looked at anew: what runs or its options may not be those of the caller's addresses.
            if seen_code(executor.encoder) != known:
                return
            self._graphs[key] = graph
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
        """Drop the graphs that have been used least recently, as long as there are too many."""
        limit = self._limit(device)
        while len(self._graphs) > self.most or (len(self._graphs) > 1 and self._bytes() > limit):
            self._finish()
            dropped, _ = self._graphs.popitem(last=False)
            self._uses[dropped] = _USES_BEFORE_CAPTURE - _USES_BEFORE_RECAPTURE

    def _limit(self, device: torch.device) -> int:
        if self.memory_limit is not None:
            return self.memory_limit
        total: int = torch.cuda.get_device_properties(device).total_memory
        return int(total * _MEMORY_SHARE)

    def _contexts(self, bucket: Bucket, cache: TurboKVCache, layout: Any) -> StaticKVCache:
        """Static contexts for a graph, shared by all graphs with as many of the same length and layout."""
        for (other, *own_layout), graph in self._graphs.items():
            if isinstance(graph, _ExtensionGraph) and other[2:4] == bucket[2:4] and tuple(own_layout) == layout:
                # Those of a model whose weights have changed would be refused.
                graph.contexts.identity = cache.identity
                return graph.contexts
        return StaticKVCache.like(cache, bucket.columns, bucket.contexts)

    def _bytes(self) -> int:
        """Bytes of all contexts, also of decoded ones."""
        tensors = {id(tensor): tensor for cache in self.caches for _, tensor in cache.named_tensors()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _finish(self) -> None:
        """Wait for the last replay: what it reads may be freed then, whatever the stream."""
        if self._done is not None:
            self._done.synchronize()

    @contextmanager
    def _exclusive(self, device: torch.device) -> Iterator[None]:
        """Wait until the last replay, on whatever stream, is done with what graphs share."""
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
