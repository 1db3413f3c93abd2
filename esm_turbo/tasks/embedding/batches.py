"""Batches of proteins, embedded one after the other, in this process or in others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device, to_host
from esm_turbo.proteins.batches import TokenRow, encode_rows, remaining_batches
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.context_sources import ContextSource
from esm_turbo.tasks.common.forwards import default_config, prefill_rows
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, halve_until_it_fits, too_large
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.embedding.request import BOS, MEAN, PER_TOK, EmbeddingRequest, ProteinEmbedding
from esm_turbo.tasks.embedding.windows import embed_in_windows, states_of

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.tasks.embedding.files import PartFiles


def embedding_batches(
    turbo: ContextModel,
    rows: Sequence[TokenRow],
    request: EmbeddingRequest,
    toks_per_batch: int,
    done: Container[int] = (),
) -> list[list[int]]:
    """Batches of proteins, given as token ids, see `remaining_batches`; warns of very long ones.

    A protein that is split into windows forms a batch of its own.
    """
    windows = request.windows
    lengths, around = [len(row) for row in rows], turbo.codes.around
    if windows is not None:
        lengths = [max(n, toks_per_batch + 1) if windows.splits(n - around) else n for n in lengths]
    reach = math.inf if windows is None else windows.reach
    warn_if_long((int(min(len(row) - around, reach)) for row in rows), turbo.model.family, stacklevel=4)
    return remaining_batches(lengths, toks_per_batch, done)


@dataclass(frozen=True)
class Embedded:
    """Results of a batch, by number of the protein in it.

    Attributes:
        failed: reasons.
        embeddings: of the others; none if they were written where they were computed.
    """

    failed: dict[int, str]
    embeddings: dict[int, ProteinEmbedding] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbedTask:
    """A `Task` whose pieces are batches of proteins.

    Attributes:
        request: the results to compute.
        length: to which proteins are truncated; None truncates none.
        finite: whether an embedding with NaN or infinity counts as failed.
        parts: writes the embeddings; None returns them.
    """

    request: EmbeddingRequest
    length: int | None = None
    finite: bool = False
    parts: PartFiles | None = None

    def run(
        self, turbo: ContextModel, pieces: Iterable[Sequence[ProteinRecord]], progress: Progress
    ) -> Iterator[Embedded]:
        """See `Task.run`."""
        if "cache" in self.request.include:
            turbo.model.refresh_fingerprint()
        # A GPU computes a batch while the caller writes the one before it; a CPU gains nothing from that.
        ahead = 1 if turbo.model.device.type == "cuda" else 0
        given = self.request.context
        context = None if given is None else given.prefilled(turbo, default_config(turbo))
        launched: deque[Callable[[], Embedded]] = deque()
        for piece in pieces:
            launched.append(self._launch(turbo, piece, context))
            if len(launched) > ahead:
                yield launched.popleft()()
        for collect in launched:
            yield collect()

    def failed(self, piece: Sequence[ProteinRecord], reason: str) -> Embedded:
        """See `Task.failed`."""
        return Embedded(dict.fromkeys(range(len(piece)), reason))

    def has_failed(self, result: Embedded) -> bool:
        """See `Task.has_failed`."""
        return bool(result.failed)

    def _launch(
        self, turbo: ContextModel, piece: Sequence[ProteinRecord], context: TurboKVCache | None
    ) -> Callable[[], Embedded]:
        """Launch a batch, in halves if it does not fit into memory."""
        rows = encode_rows(turbo.codes, [record.sequence[: self.length] for record in piece])
        result = Embedded({})

        def fail(row: int, error: Exception) -> None:
            result.failed[row] = too_large(len(rows[row]) - turbo.codes.around, turbo.model.device)

        def embed_part(part: Sequence[int]) -> Callable[[], list[tuple[int, ProteinEmbedding]]]:
            return _embed_batch(turbo, rows, part, self.request, context)

        halves = halve_until_it_fits(embed_part, range(len(rows)), fail)

        def collect() -> Embedded:
            for row, embedding in (pair for half in halves for pair in half()):
                if self.finite and not embedding.is_finite():
                    result.failed[row] = "its embedding is not finite; try --dtype float32"
                elif self.parts is None:
                    result.embeddings[row] = embedding
                else:
                    self.parts.write(piece[row], embedding)
            return result

        return collect


@torch.no_grad()
def _embed_batch(
    turbo: ContextModel,
    rows: Sequence[TokenRow],
    batch: Sequence[int],
    request: EmbeddingRequest,
    context: TurboKVCache | None,
) -> Callable[[], list[tuple[int, ProteinEmbedding]]]:
    """Launch a batch. The function returned waits for it and returns its embeddings."""
    first = len(turbo.codes.before)
    lengths = [len(rows[index]) - turbo.codes.around for index in batch]
    _check_memory(turbo, lengths, request)
    if request.windows is not None and request.windows.splits(lengths[0]):
        [index] = batch
        parts = embed_in_windows(turbo, rows[index][1:-1], request.windows, request.layers, request.include)
        return lambda: [(index, ProteinEmbedding(**parts, contacts=None, cache=None))]
    device = turbo.model.device
    input_ids, attention_mask = turbo.codes.batch([rows[index] for index in batch])
    contacts = caches = copied = None
    # First, while the memory that was found free is still free.
    if "cache" in request.include:
        caches = _caches(turbo, [rows[index] for index in batch], request.store)
    found: dict[str, dict[int, Tensor]] = {}
    of_residues = [turbo.codes.residues_among(rows[i][first : first + n]) for i, n in zip(batch, lengths, strict=True)]
    if request.include & {"mean", "per_tok", "bos"}:
        tokens = [len(rows[index]) for index in batch]
        for layer, states in _hidden_states(turbo, input_ids, attention_mask, tokens, request.layers, context).items():
            residues = [states[row, first : first + n] for row, n in enumerate(lengths)]
            if "per_tok" in request.include:
                # Without padding, and converted on the device, which is fastest.
                found.setdefault(PER_TOK, {})[layer] = to_host(torch.cat(residues).float())
            if "mean" in request.include:
                means = torch.stack([x[at].float().mean(dim=0) for x, at in zip(residues, of_residues, strict=True)])
                found.setdefault(MEAN, {})[layer] = to_host(means)
            if "bos" in request.include:
                found.setdefault(BOS, {})[layer] = to_host(states[:, 0].float())
    if "contacts" in request.include:
        tokens_and_mask = (to_device(x, device) for x in (input_ids, attention_mask))
        contacts = to_host(turbo.model.base_model.predict_contacts(*tokens_and_mask))
    if device.type == "cuda":
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))

    def collect() -> list[tuple[int, ProteinEmbedding]]:
        if copied is not None:
            copied.synchronize()
        embeddings = []
        for row, (index, n, end) in enumerate(zip(batch, lengths, accumulate(lengths), strict=True)):
            residues = slice(end - n, end)
            # Copies, so that no embedding keeps the whole batch alive.
            parts = {
                kind: {layer: x[residues if kind == PER_TOK else row].clone() for layer, x in layers.items()}
                for kind, layers in found.items()
            }
            embedding = ProteinEmbedding(
                **parts,
                contacts=None if contacts is None else contacts[row, :n, :n].to(torch.float32, copy=True),
                cache=None if caches is None else caches[row],
            )
            embeddings.append((index, embedding))
        return embeddings

    return collect


def _check_memory(turbo: ContextModel, lengths: Sequence[int], request: EmbeddingRequest) -> None:
    """Check that a batch of proteins, or one that is split into windows, fits into memory with its results."""
    config, tokens = turbo.model.config, max(lengths) + turbo.codes.around
    split = request.windows is not None and request.windows.splits(lengths[0])
    more = 0
    if "per_tok" in request.include:
        more += 4 * config.hidden_size * sum(lengths) * len(request.layers)
    if "contacts" in request.include:
        # The weights of all layers and heads, stacked, masked and symmetrised.
        pairs = len(lengths) * tokens**2
        more += 4 * turbo.model.dtype.itemsize * config.num_hidden_layers * config.num_attention_heads * pairs
    if request.windows is not None and split:
        tokens = request.windows.window
    if set(request.layers) != {config.num_hidden_layers}:
        more += turbo.model.dtype.itemsize * config.hidden_size * tokens * len(lengths) * config.num_hidden_layers
    if "cache" in request.include:
        more += cache_bytes(turbo.model.base_model, tokens * len(lengths))
    check_memory(turbo.model.base_model, tokens, rows=len(lengths), more=more)


def _caches(turbo: ContextModel, rows: Sequence[TokenRow], store: ContextSource | None) -> list[TurboKVCache]:
    """A cache for each row: `<cls>` and the residues, without `<eos>`."""
    if store is None:
        # `ContextModel.prefill` would wait for the device in every batch, to look for changed weights.
        contexts = prefill_rows(turbo, [row[:-1] for row in rows], turbo.model.base_model.turbo_config)
    else:
        contexts = store.get_or_prefill(turbo, [turbo.codes.decode(row[1:-1]) for row in rows])
    return contexts.cut([len(row) - 1 for row in rows])


def _hidden_states(
    turbo: ContextModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    layers: Sequence[int],
    context: TurboKVCache | None,
) -> dict[int, Tensor]:
    """Hidden states [batch, n, hidden_size] of the given layers, after a context; `lengths` counts tokens per row."""
    last = turbo.model.config.num_hidden_layers
    # The states of all layers take many times the memory of the last one's.
    output = turbo.model.base_model(
        input_ids,
        attention_mask,
        output_hidden_states=set(layers) != {last},
        **({"row_lengths": lengths} if context is None else {"past_key_values": context}),
    )
    states = states_of(output, last)
    return {layer: states[layer] for layer in layers}
