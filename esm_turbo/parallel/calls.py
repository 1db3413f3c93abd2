"""Calls of `TurboEsm` on several devices: what one process would compute, in pieces that several share.

A piece is computed by a call of the same function, so that whoever computes it, and how many do, results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from esm_turbo.parallel.workers import Workers
from esm_turbo.proteins.batches import encode_rows
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.pieces import Runner, Task
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.embedding.embed import EmbeddingRequest, ProteinEmbedding, embed_batches, embedding_batches

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

Devices = str | Sequence[str] | Workers
"""`all`, names of devices, or processes that run already."""

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")


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


class DeviceRunner:
    """A `Runner` on devices, whose processes start when pieces are run.

    Args:
        turbo: the model.
        devices: where copies of it run.
    """

    shares_files = True

    def __init__(self, turbo: ContextModel, devices: Devices) -> None:
        self._turbo, self._devices = turbo, devices
        # Of a string, `workers_on` allows CUDA devices only.
        names = ["cuda"] if isinstance(devices, str) else devices
        self.devices = names.devices if isinstance(names, Workers) else " ".join(names)

    def run(
        self,
        task: Task[PieceT, ResultT],
        pieces: Sequence[PieceT],
        *,
        stage: str,
        units: Sequence[int],
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, ResultT]]:
        """See `Runner.run`."""
        with workers_on(self._turbo, self._devices) as workers:
            yield from workers.run(task, pieces, stage=stage, units=units, progress=progress)


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
    runner, rows = DeviceRunner(turbo, devices), encode_rows(turbo.codes, sequences)
    batches = embedding_batches(turbo, rows, request, protein_tokens(toks_per_batch, turbo, runner.devices))
    pieces = [[sequences[index] for index in batch] for batch in batches]
    found: dict[int, ProteinEmbedding] = {}
    failed: dict[int, str] = {}
    units = [sum(map(len, piece)) for piece in pieces]
    for number, (embeddings, reasons) in runner.run(_EmbedCall(request), pieces, stage="embed", units=units):
        found |= {batches[number][row]: embedding for row, embedding in embeddings}
        failed |= {batches[number][row]: reason for row, reason in reasons.items()}
    if failed:
        first = min(failed)
        raise RuntimeError(f"sequence {first + 1} was not embedded: {failed[first]}")
    return [found[index] for index in range(len(sequences))]


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
