"""Runs in pieces: how a task cuts its input, so that any number of processes can share the work.

Pieces follow from the input and the options alone, never from who runs them: each is computed as a whole, in batches of
its own, so that on a CPU, with one number of threads, results have the same bits however many processes compute them. A
task hands its pieces to a `Runner`, which returns their results in any order, and joins them.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from esm_turbo.tasks.common.progress import Progress, StageProgress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

PieceT = TypeVar("PieceT")
IndicesT = TypeVar("IndicesT", bound=Sequence[int])
ResultT = TypeVar("ResultT")
_Piece = TypeVar("_Piece", contravariant=True)
_Result = TypeVar("_Result", covariant=True)


TOKENS_PER_PIECE = 2**17
"""Tokens of a usual piece on a GPU, where they take seconds. On a CPU it has an eighth of them."""
CPU_COST_PER_PIECE = 3 * 10**12
"""Operations of the largest piece on a CPU, see `forward_cost`: a minute at 50 GFLOP/s, which two cores reach."""
_PIECES, _FEWEST, _LARGER, _CPU_PART = 64, 8, 4, 8


class Task(Protocol[_Piece, _Result]):
    """What is done with every piece of a run. Tasks, pieces and results can be pickled."""

    def run(self, turbo: ContextModel, pieces: Iterable[_Piece], progress: Progress) -> Iterator[_Result]:
        """Yield the result of every piece, in order.

        Args:
            turbo: the model.
            pieces: taken one by one, at most one ahead of the results.
            progress: may be told how far a piece has come; the pieces before it are added.
        """

    def failed(self, piece: _Piece, reason: str) -> _Result:
        """The result of a piece that no process survives: all its records have failed, for this reason."""

    def has_failed(self, result: Any) -> bool:
        """Whether any record of a piece has failed."""


class Runner(ABC):
    """Where pieces are run: in this process, in others, or on other machines.

    Attributes:
        shares_files: whether the files that a piece writes are those of this process.
        devices: what the pieces run on, such as `cpu` or `cuda:0 cuda:1`; None for the model's own.
    """

    shares_files = True
    devices: str | None = None

    def run(
        self,
        task: Task[PieceT, ResultT],
        pieces: Sequence[PieceT],
        *,
        stage: str,
        units: Sequence[int],
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield the result of every piece once, with its index, in any order.

        Args:
            task: what is done with a piece.
            pieces: the pieces.
            stage: name of the run for `progress`.
            units: size of each piece, by which progress is counted.
            progress: see `Progress`.
        """
        counter = StageProgress(progress, stage, sum(units))
        counter.advance(0)
        for index, result in self.results(task, pieces, units, counter.within):
            yield index, result
            # After the result was used: when it was written, for example.
            counter.advance(units[index])

    @abstractmethod
    def results(
        self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], units: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, ResultT]]:
        """As `run`, which counts what is finished; `progress` is of the piece that runs now, if that can be told."""


class InProcessRunner(Runner):
    """Runs pieces in this process, in their order."""

    def __init__(self, turbo: ContextModel) -> None:
        self.turbo = turbo

    def results(
        self, task: Task[PieceT, ResultT], pieces: Sequence[PieceT], units: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, ResultT]]:
        """See `Runner.results`."""
        return enumerate(task.run(self.turbo, pieces, progress))


class Shard(NamedTuple):
    """One of several runs that share the pieces of one input.

    Attributes:
        number: from 1.
        of: number of shards.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `3/16`.

        Raises:
            ValueError: it is something else.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"a shard is written K/N with K from 1 to N, such as 3/16; got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass
class Plan:
    """Which pieces of a run are those of a shard.

    Attributes:
        shard: the shard.
        total: number of all pieces, after `choose`.
        chosen: indices of its own, after `choose`.
        digest: hash over all pieces and their division, after `choose`: shards of one digest have each piece once.
    """

    shard: Shard
    total: int = 0
    chosen: list[int] = field(default_factory=list)
    digest: str = ""

    def choose(self, pieces: Sequence[IndicesT], names: Sequence[str], costs: Sequence[int]) -> list[IndicesT]:
        """The pieces of the shard.

        Args:
            pieces: indices of the records of each.
            names: of the records.
            costs: how long each record takes, in any unit.
        """
        sums = [sum(costs[index] for index in piece) for piece in pieces]
        shares = balanced(sums, self.shard.of)
        described = [f"{cost} {' '.join(names[i] for i in piece)}" for cost, piece in zip(sums, pieces, strict=True)]
        self.digest = hashlib.sha256("\n".join([*described, str(shares)]).encode()).hexdigest()
        self.total, self.chosen = len(pieces), shares[self.shard.number - 1]
        return [pieces[number] for number in self.chosen]


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide pieces into parts of about the same cost: the largest first, each to the part that has least so far.

    The result depends on the costs alone. The most costly part takes at most 4/3 of the time of the best division
    (Graham 1969).

    Args:
        costs: of the pieces.
        parts: number of parts.

    Returns:
        The indices of the pieces of every part, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return [sorted(share) for share in shares]


def piece_limit(tokens: int, cost: int, *, on_cuda: bool = True) -> int:
    """Largest cost of a piece of a screen: a 64th of all, which a stopped run may lose, within limits.

    On a GPU a usual piece is four batches, and where rows differ in length a fifth that is nearly empty; the largest
    have four times as many. Of a screen with less than eight usual ones a piece is an eighth, so that a few processes
    can share it, but not less than a quarter of a usual one.

    On a CPU no piece is larger than a usual one, which takes seconds with a small model, and with a large model none
    has more than `CPU_COST_PER_PIECE`.

    Args:
        tokens: of all pieces.
        cost: of all pieces, see `forward_cost`.
        on_cuda: whether CUDA devices run them.
    """
    usual = TOKENS_PER_PIECE if on_cuda else max(1, TOKENS_PER_PIECE // _CPU_PART)
    least = -(-usual // _LARGER)
    most = min(max(least, min(usual, tokens // _FEWEST), tokens // _PIECES), _LARGER * usual if on_cuda else usual)
    own = most * cost // max(1, tokens)
    return own if on_cuda else min(own, CPU_COST_PER_PIECE)


def packed(items: Sequence[PieceT], sizes: Sequence[int], limit: int) -> list[tuple[PieceT, ...]]:
    """Pieces of items in their order, as many in each as a limit of their sizes permits, at least one."""
    pieces, piece, total = list[tuple[PieceT, ...]](), list[PieceT](), 0
    for item, size in zip(items, sizes, strict=True):
        if piece and total + size > limit:
            pieces.append(tuple(piece))
            piece, total = [], 0
        piece.append(item)
        total += size
    return [*pieces, tuple(piece)] if piece else pieces


def forward_cost(turbo: ContextModel, tokens: int, context: int) -> int:
    """Operations of running tokens that each attend to `context` tokens.

    Linear layers take 24 hidden_size^2 per token and layer, and attention 4 hidden_size for each token that it sees.
    """
    config = turbo.model.config
    return int(4 * config.num_hidden_layers * config.hidden_size * tokens * (6 * config.hidden_size + context))
