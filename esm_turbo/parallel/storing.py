"""Filling a store of contexts in pieces: each process claims and computes its own batches, see `ContextStore`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esm_turbo.context_store import ContextStore
from esm_turbo.proteins.batches import remaining_batches
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.pieces import Plan, Runner, forward_cost
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.common.same_model import run_on_model

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

_Stored = tuple[int, dict[str, str]]
"""Number of contexts that were computed, and the sequences that do not fit into memory with the reasons."""


@dataclass(frozen=True)
class _StoreTask:
    """Adds the contexts of batches to a store."""

    store: ContextStore

    def run(self, turbo: ContextModel, pieces: Iterable[Sequence[str]], progress: Progress) -> Iterator[_Stored]:
        failed: dict[str, str] = {}
        taken: deque[Sequence[str]] = deque()

        def batches() -> Iterator[Sequence[str]]:
            for piece in pieces:
                taken.append(piece)
                yield piece

        for computed in self.store.add_batches(turbo, batches(), failed.__setitem__):
            yield computed, {sequence: failed[sequence] for sequence in taken.popleft() if sequence in failed}

    def failed(self, piece: Sequence[str], reason: str) -> _Stored:
        return 0, dict.fromkeys(piece, reason)

    def has_failed(self, result: _Stored) -> bool:
        return bool(result[1])


def store_sequences(
    turbo: ContextModel,
    store: ContextStore,
    sequences: Sequence[str],
    *,
    toks_per_batch: int | None = None,
    progress: Progress | None = None,
    on_failure: Callable[[str, str], None],
    runner: Runner | None = None,
    plan: Plan | None = None,
) -> int:
    """Add contexts to a store, see `ContextStore.add`.

    Args:
        sequences: residues of the proteins; where contexts are homologs, those of each, separated by commas.
        toks_per_batch: padded tokens per batch; None is 16,384 where CUDA devices compute them, and else 4,096.
        runner: where batches are computed; None is this process.
        plan: which batches are computed; None is all.

    Returns:
        Number of contexts computed.

    Raises:
        OSError: contexts that others have computed are not in this store: its folder is not theirs.
    """
    toks_per_batch = protein_tokens(toks_per_batch, turbo, None if runner is None else runner.devices)
    rows = turbo.encode_contexts(sequences)
    first = {row.tobytes(): index for index, row in reversed([*enumerate(rows)])}
    unique = sorted(first.values())
    lengths = [len(rows[index]) for index in unique]
    batches = [[unique[i] for i in batch] for batch in remaining_batches(lengths, toks_per_batch)]
    if plan is not None:
        batches = plan.choose(batches, sequences, [forward_cost(turbo, len(row), len(row)) for row in rows])
    if runner is None:
        own = [sequences[index] for index in sorted(index for batch in batches for index in batch)]
        if not own:
            return 0
        return store.add(turbo, own, toks_per_batch=toks_per_batch, progress=progress, on_failure=on_failure)
    computed, failed = 0, dict[str, str]()
    pieces = [[sequences[index] for index in batch] for batch in batches]
    units = [sum(len(rows[index]) - 1 for index in batch) for batch in batches]
    run = run_on_model(turbo, runner, _StoreTask(store), pieces, stage="prefill", units=units, progress=progress)
    for _, (count, reasons) in run:
        computed += count
        failed |= reasons
    for sequence, reason in failed.items():
        on_failure(sequence, reason)
    # Of workers that were killed.
    store.sweep()
    lacking = store.count_missing(turbo, [one for piece in pieces for one in piece if one not in failed])
    if lacking:
        raise OSError(
            f"{store.folder}: {lacking} contexts are missing that other machines have computed; give a folder that all"
            " machines share"
        )
    return computed
