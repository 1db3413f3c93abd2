"""Calls of `TurboEsm` on several devices: what one process would compute, in pieces that several share.

A piece is computed by a call of the same function, so that whoever computes it, and how many do, results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.context_model import as_list
from esm_turbo.parallel.workers import Workers
from esm_turbo.proteins.batches import encode_rows
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.arms import protein_tokens, runs_on_cuda
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.options import Background
from esm_turbo.tasks.common.pieces import TOKENS_PER_PIECE, Runner, Task, packed, piece_limit
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding, embed_batches, embedding_batches
from esm_turbo.tasks.scoring.pairs import PairScores, TargetPairs, checked_pairs, score_against, score_pairs
from esm_turbo.tasks.variants.many import ManyVariantScores, checked_proteins, score_many_variants

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

Devices = str | Sequence[str] | Workers
"""`all`, names of devices, or processes that run already."""

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")

_TOKENS_PER_PIECE = TOKENS_PER_PIECE


@contextlib.contextmanager
def workers_on(turbo: ContextModel, devices: Devices) -> Iterator[Runner]:
    """Processes with copies of a model; they end with the block, unless they ran already.

    Args:
        turbo: the model.
        devices: where copies of it run.

    Raises:
        ValueError: no devices are named, or there are none.
    """
    if isinstance(devices, Workers):
        yield devices
        return
    if isinstance(devices, str):
        if devices != "all":
            raise ValueError(
                f"`devices` must be 'all', a list of names such as ['cuda:0', 'cuda:1'], or Workers, got {devices!r}"
            )
        import torch

        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if not devices:
            raise ValueError("devices='all' finds no CUDA device here; on the CPU, name it once for every process")
    with Workers.of(turbo, devices) as workers:
        yield workers


def _names(devices: Devices) -> str:
    """The runner for these devices, see `Runner.devices`; of a string, `workers_on` allows CUDA devices only."""
    if isinstance(devices, Workers):
        return devices.devices
    return "cuda" if isinstance(devices, str) else " ".join(devices)


def embed_on(
    turbo: ContextModel,
    devices: Devices,
    sequences: Sequence[str],
    request: EmbeddingRequest,
    toks_per_batch: int | None = None,
) -> list[ProteinEmbedding]:
    """`tasks.embedding.embed.embed` on several devices.

    Raises:
        ValueError: as `embed`; or caches are requested, which lie on the device of one process.
        RuntimeError: a sequence could not be embedded, for lack of memory or since its process died again and again.
    """
    if "cache" in request.include:
        raise ValueError("`devices` computes embeddings, but no caches: fill a store, see `store_sequences`")
    rows = encode_rows(turbo.codes, sequences)
    batches = embedding_batches(turbo, rows, request, protein_tokens(toks_per_batch, turbo, _names(devices)))
    pieces = [[sequences[index] for index in batch] for batch in batches]
    found: dict[int, ProteinEmbedding] = {}
    failed: dict[int, str] = {}
    units = [sum(map(len, piece)) for piece in pieces]
    for number, (embeddings, reasons) in _run(turbo, devices, _EmbedCall(request), pieces, "embed", units):
        found |= {batches[number][row]: embedding for row, embedding in embeddings}
        failed |= {batches[number][row]: reason for row, reason in reasons.items()}
    if failed:
        first = min(failed)
        raise RuntimeError(f"sequence {first + 1} was not embedded: {failed[first]}")
    return [found[index] for index in range(len(sequences))]


def score_pairs_on(
    turbo: ContextModel,
    targets: Sequence[str],
    candidates: Sequence[str] | Sequence[Sequence[str]],
    *,
    devices: Devices,
    refresh: int = DEFAULT_REFRESH,
    background: Background | Sequence[str] = "targets",
    progress: Progress | None = None,
    **options: Any,
) -> PairScores:
    """`tasks.scoring.pairs.score_pairs` on several devices, whose `options` are the others."""
    check_count("refresh", refresh, 0)
    task = _Call(score_pairs, PairScores, {"refresh": refresh, "background": "none", **options})

    def score_all(pairs: Sequence[TargetPairs], progress: Progress | None) -> PairScores:
        costs = [sum(len(one) * (refresh + len(one) + 1) for one in pair.candidates) for pair in pairs]
        groups = _groups(turbo, devices, costs)
        pieces = [([pairs[i].target for i in group], [list(pairs[i].candidates) for i in group]) for group in groups]
        units = [sum(len(one) for i in group for one in pairs[i].candidates) for group in groups]
        return PairScores(*_joined(groups, _run(turbo, devices, task, pieces, "score", units, progress)))

    return score_against(checked_pairs(turbo, targets, candidates), background, score_all, progress)


def score_many_variants_on(
    turbo: ContextModel,
    wild_types: Sequence[str | ProteinRecord],
    variants: Sequence[Sequence[str]] | None = None,
    *,
    devices: Devices,
    refresh: int = DEFAULT_REFRESH,
    progress: Progress | None = None,
    **options: Any,
) -> ManyVariantScores:
    """`tasks.variants.many.score_many_variants` on several devices, whose `options` are the others."""
    check_count("refresh", refresh, 0)
    given, lists = checked_proteins(wild_types, variants)
    groups = _groups(turbo, devices, [len(one) * (refresh + 1) for one in as_list(given, "wild_type")])
    pieces = [
        ([given[i] for i in group], None if lists is None else [list(lists[i]) for i in group]) for group in groups
    ]
    task = _Call(score_many_variants, ManyVariantScores, {"refresh": refresh, **options})
    units = list(map(len, groups))
    return ManyVariantScores(*_joined(groups, _run(turbo, devices, task, pieces, "score", units, progress)))


def _run(
    turbo: ContextModel,
    devices: Devices,
    task: Task[PieceT, ResultT],
    pieces: Sequence[PieceT],
    stage: str,
    units: Sequence[int],
    progress: Progress | None = None,
) -> Iterator[tuple[int, ResultT]]:
    with workers_on(turbo, devices) as workers:
        yield from workers.run(task, pieces, stage=stage, units=units, progress=progress)


def _groups(turbo: ContextModel, devices: Devices, costs: Sequence[int]) -> list[tuple[int, ...]]:
    """Indices of inputs that form a piece."""
    on_cuda = runs_on_cuda(turbo, _names(devices))
    return packed(range(len(costs)), costs, piece_limit(sum(costs), _TOKENS_PER_PIECE, on_cuda=on_cuda))


def _joined(
    groups: Sequence[Sequence[int]], results: Iterable[tuple[int, Any]]
) -> tuple[tuple[Any, ...], dict[int, str]]:
    """The scores of all inputs, and the reasons of those that have none."""
    scores: list[Any] = [None] * sum(map(len, groups))
    failed: dict[int, str] = {}
    for number, result in results:
        for place, index in enumerate(groups[number]):
            scores[index] = result.scores[place]
            if place in result.failed:
                failed[index] = result.failed[place]
    return tuple(scores), dict(sorted(failed.items()))


_Embedded = tuple[list[tuple[int, ProteinEmbedding]], dict[int, str]]


@dataclass(frozen=True)
class _EmbedCall:
    """Embeds batches."""

    request: EmbeddingRequest

    def run(self, turbo: ContextModel, pieces: Iterable[Sequence[str]], progress: Progress) -> Iterator[_Embedded]:
        return embed_batches(turbo, pieces, self.request)

    def failed(self, piece: Sequence[str], reason: str) -> _Embedded:
        return [], dict.fromkeys(range(len(piece)), reason)

    def has_failed(self, result: _Embedded) -> bool:
        return bool(result[1])


@dataclass(frozen=True)
class _Call:
    """Calls a function of a model and of some inputs, with a list of what belongs to each.

    Attributes:
        function: what is called.
        result: class of what it returns.
        options: of the function.
    """

    function: Callable[..., Any]
    result: Callable[..., Any]
    options: Mapping[str, Any]

    def run(
        self, turbo: ContextModel, pieces: Iterable[tuple[list[Any], Any]], progress: Progress
    ) -> Iterator[PairScores | ManyVariantScores]:
        for inputs, own in pieces:
            yield self.function(turbo, inputs, own, progress=progress, **self.options)

    def failed(self, piece: tuple[list[Any], Any], reason: str) -> Any:
        count = len(piece[0])
        return self.result((None,) * count, dict.fromkeys(range(count), reason))

    def has_failed(self, result: PairScores | ManyVariantScores) -> bool:
        return bool(result.failed)
