"""What the row engine runs: the rows of an item, such as a target with candidates, by the contexts that they read.

A task says which contexts an item has (`RowGroup.context`), which rows read them (`RowGroup.rows`) and how predictions
become its result (`RowGroup.reduce`, `ItemRows.result`). `row_engine` and the service do the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.kv_cache import TurboKVCache

ResultT = TypeVar("ResultT")


class RowBatch(NamedTuple):
    """Rows of one group, as the model takes them.

    Attributes:
        input_ids: [n, width].
        at: index of the token to predict in each row, int64 [n]; or of k tokens, [n, k].
        visible: tokens of the context that each row sees, [n, kept]; None for all.
        position_ids: [n, width]; None for those after the context.
    """

    input_ids: Tensor
    at: Tensor
    visible: Tensor | None = None
    position_ids: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RowGroup(ABC):
    """Rows that read one context, or whole proteins that read none.

    Attributes:
        context: token ids that the context is computed from; none if the rows read none.
        kept: number of them that the rows read, the first ones.
        count: number of rows.
        width: tokens in each row.
        hides: whether they hide tokens of the context from some rows.
        cache: the context, `kept` tokens of one row, where it need not be computed.
        query: tokens that are appended to the context before the rows read it, and are a part of `kept`.
    """

    context: Sequence[int] = ()
    kept: int = 0
    count: int
    width: int
    hides: bool = False
    cache: TurboKVCache | None = None
    query: Sequence[int] = ()

    @abstractmethod
    def rows(self, numbers: Tensor) -> RowBatch:
        """Make the rows of these numbers, int64 [n]."""

    @abstractmethod
    def reduce(self, numbers: Tensor, log_probs: Tensor) -> Tensor:
        """What is kept of the log-probabilities of these rows, float32 [n, vocab_size], or [n, k, vocab_size]."""

    @property
    def key(self) -> tuple[int, ...]:
        """Tells its context from others: its token ids, and which cache where that was given."""
        return (*self.context, *(() if self.cache is None else (id(self.cache),)))

    @property
    def predictions(self) -> int:
        """Number of predicted tokens, one in each row unless rows have several."""
        return self.count

    @property
    def predicts_one(self) -> bool:
        """Whether each row predicts one token, so that rows of other groups may share its batches."""
        return self.predictions == self.count

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.count * self.width


class RowSlice(NamedTuple):
    """Rows of a group, and the context that they read.

    Attributes:
        group: of the rows.
        numbers: of the rows, int64 [n].
        cache: holds the context, `kept` tokens of it; None for no context.
        row: of the context in the cache.
    """

    group: RowGroup
    numbers: Tensor
    cache: TurboKVCache | None
    row: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the rows."""
        return len(self.numbers) * self.group.width


class ItemRows(ABC, Generic[ResultT]):
    """The rows of one item of a task.

    Attributes:
        groups: by their contexts.
    """

    groups: Sequence[RowGroup]

    @abstractmethod
    def result(self, predicted: Sequence[Tensor]) -> ResultT:
        """The result of the item, from what `RowGroup.reduce` has kept of each group."""


class RowRun(NamedTuple, Generic[ResultT]):
    """Items that share batches with each other, and with no others.

    Attributes:
        items: their rows, made as they are needed, a wave ahead; or why an item has none.
        config: how their contexts are stored; None if they have none.
        toks_per_batch: tokens per batch, of contexts and of rows.
    """

    items: Iterable[ItemRows[ResultT] | Exception]
    config: TurboConfig | None
    toks_per_batch: int
