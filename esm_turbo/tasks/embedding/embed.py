"""Embeddings of proteins, as `esm-extract` makes them, and their compressed caches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.codecs.transfers import to_device, to_host
from esm_turbo.files.identity import lasting_identity
from esm_turbo.files.tabular import named
from esm_turbo.files.tensor_digests import tensors_digest
from esm_turbo.model.heads import check_head, check_reads_on
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.proteins.batches import TokenRow, encode_rows, remaining_batches
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.context_sources import ContextSource, check_store
from esm_turbo.tasks.common.forwards import prefill_rows, protein_tokens
from esm_turbo.tasks.common.memory import cache_bytes, check_memory, halve_until_it_fits, too_large
from esm_turbo.tasks.common.options import Include
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner
from esm_turbo.tasks.common.progress import Progress
from esm_turbo.tasks.embedding.windows import Windows, embed_in_windows

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.tasks.embedding.files import PartFiles

RESULT_NAMES = {
    "per_tok": "representations",
    "mean": "mean_representations",
    "bos": "bos_representations",
    "contacts": "contacts",
}
"""Names of the results of an embedding, as `include` requests them."""
_PER_TOK, _MEAN, _BOS, _ = RESULT_NAMES.values()


@dataclass(frozen=True)
class ProteinEmbedding:
    """The requested results of one protein, named as in the files of `esm-extract`; None if not requested.

    Tensors are float32 on the CPU. L is the number of residues. Layer 0 is the input of the first layer; the last layer
    is taken after the model's final layer norm. Layers are numbered from 0, even if negative numbers were requested.

    Attributes:
        representations: by layer, hidden states of the residues, [L, hidden_size].
        mean_representations: by layer, their mean over the residues, [hidden_size].
        bos_representations: by layer, hidden state of `<cls>`, [hidden_size].
        contacts: predicted contact probabilities, [L, L].
        cache: the protein's cache, as from `ContextModel.prefill`.
    """

    representations: dict[int, Tensor] | None = None
    mean_representations: dict[int, Tensor] | None = None
    bos_representations: dict[int, Tensor] | None = None
    contacts: Tensor | None = None
    cache: TurboKVCache | None = None

    def __repr__(self) -> str:
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors().items()}
        return named(self, *(f"{name} {shape}" for name, shape in shapes.items()), cache=self.cache)

    def is_finite(self) -> bool:
        """Whether no tensor holds NaN or infinity."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by flat name, such as `mean_representations.12`, without the cache."""
        flat: dict[str, Tensor] = {}
        for kind in (_PER_TOK, _MEAN, _BOS):
            flat |= {f"{kind}.{layer}": tensor for layer, tensor in (getattr(self, kind) or {}).items()}
        return flat if self.contacts is None else flat | {"contacts": self.contacts}


@dataclass(frozen=True)
class EmbeddingRequest:
    """Results to compute for every protein.

    Attributes:
        layers: layers whose hidden states are returned, from 0 to the number of layers.
        include: see `embed`.
        windows: the split of long proteins into windows; None computes every protein whole.
        store: a `ContextStore` that caches are taken from and added to; None computes them.
    """

    layers: tuple[int, ...]
    include: frozenset[str]
    windows: Windows | None = None
    store: ContextSource | None = None

    @property
    def writes_contexts(self) -> bool:
        """Whether contexts are cached under the model's preset."""
        return "cache" in self.include or (self.windows is not None and bool(self.windows.memory))

    @classmethod
    def of(
        cls,
        turbo: ContextModel,
        repr_layers: Sequence[int],
        include: Iterable[str],
        windows: Windows | None = None,
        store: ContextSource | None = None,
    ) -> EmbeddingRequest:
        """Check a request; the arguments are those of `embed`.

        Raises:
            ValueError: nothing is requested, a layer does not exist, an item of `include` is unknown, caches are
                requested and the model cannot write them, contacts are requested and the model's contact head was
                never trained, the results are not available in windows, or a store is given and no caches are
                requested.
        """
        check_reads_on(turbo.model.base_model, "`embed`")
        items = frozenset([include] if isinstance(include, str) else include)
        allowed = get_args(Include)
        if not items or not items <= set(allowed):
            raise ValueError(f"`include` must be some of {list(allowed)}, got {sorted(items)}")
        layers = _layers(repr_layers, turbo.model.config.num_hidden_layers)
        if windows is not None and items & {"contacts", "cache"}:
            raise ValueError(
                f"window by window there are no contacts and no cache of a whole protein, got {sorted(items)}"
            )
        if "contacts" in items:
            check_head(turbo.model, "contact_head")
        check_store(store)
        if store is not None and "cache" not in items:
            raise ValueError(f"a store keeps caches: include 'cache', got {sorted(items)}")
        request = cls(layers, items, windows, store)
        if "cache" in items:
            turbo.model.new_cache()
        elif request.writes_contexts:
            turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
        return request


def embed(
    turbo: ContextModel,
    sequences: Sequence[str],
    repr_layers: Sequence[int] = (-1,),
    include: Iterable[str] = ("mean", "per_tok"),
    toks_per_batch: int | None = None,
    return_cache: bool = False,
    windows: Windows | None = None,
    store: ContextSource | None = None,
    runner: Runner | None = None,
) -> list[ProteinEmbedding]:
    """Embed proteins. `iter_embeddings` does the same without keeping all results.

    Args:
        sequences: residues; `<mask>` may stand for one.
        repr_layers: from 0, the input of the first layer, to the number of layers; negative ones count from the end.
        include: some of `mean`, `per_tok`, `bos` (`<cls>`), `contacts` and `cache`.
        toks_per_batch: padded tokens per batch; None is 16,384 on CUDA, and else 4,096. A longer protein forms a batch
            of its own.
        return_cache: same as `cache` in `include`.
        windows: the split of long proteins into windows; None computes every protein whole.
        store: with caches, a `ContextStore` whose contexts are used and to which missing ones are added.
        runner: where batches are computed; None is this process.

    Returns:
        One embedding per sequence, in the same order.

    Raises:
        ValueError: a sequence is empty or has a letter that is not a residue, a layer does not exist, an item of
            `include` is unknown, caches are requested under a preset that needs a calibration and there is none, or
            contacts are requested of a model whose contact head was never trained.
        RuntimeError: a runner could not embed a sequence.
    """
    include = [include] if isinstance(include, str) else list(include)
    request = EmbeddingRequest.of(turbo, repr_layers, [*include, *(["cache"] if return_cache else [])], windows, store)
    if runner is not None and "cache" in request.include:
        # A cache lies on the device of one process.
        raise ValueError("`devices` computes embeddings, but no caches: fill a store, see `store_sequences`")
    embeddings: dict[int, ProteinEmbedding] = {}
    for batch in iter_embeddings(turbo, sequences, request, toks_per_batch, runner=runner):
        embeddings.update(batch)
    return [embeddings[index] for index in range(len(sequences))]


def embedding_settings(turbo: ContextModel, request: EmbeddingRequest) -> dict[str, Any]:
    """Everything that determines the values of embeddings up to rounding, as JSON values.

    Raises:
        ValueError: the model cannot be identified, see `ModelIdentity.check_lasting`.
    """
    settings: dict[str, Any] = {
        "model": turbo.name,
        "weights": lasting_identity(turbo.model).digest,
        "dtype": str(turbo.model.dtype).removeprefix("torch."),
        "repr_layers": sorted(request.layers),
        "include": sorted(request.include),
    }
    if request.windows is not None:
        settings["windows"] = asdict(request.windows)
    if request.writes_contexts:
        codec = turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
        settings |= {"cache": codec.config.to_dict(), "codec": tensors_digest(sorted(codec.state.items()))}
    return settings


def iter_embeddings(
    turbo: ContextModel,
    sequences: Sequence[str],
    request: EmbeddingRequest,
    toks_per_batch: int | None = None,
    *,
    done: Container[int] = (),
    on_failure: Callable[[int, str], None] | None = None,
    runner: Runner | None = None,
) -> Iterator[list[tuple[int, ProteinEmbedding]]]:
    """Embed proteins batch by batch, the longest first, in memory that does not grow with their number.

    All arguments are checked before the first batch. A batch that does not fit into memory is halved.

    Args:
        sequences: as for `embed`, and so is `toks_per_batch`.
        request: the results to compute.
        done: indices to leave out. The other proteins keep their batches, see `remaining_batches`.
        on_failure: called with the index of a protein that does not fit into memory, and the reason; None raises.
        runner: where batches are computed; None is this process.

    Yields:
        The embeddings of a batch, each with its index in `sequences`.

    Raises:
        ValueError: a sequence is empty or has a letter that is not a residue.
        NotEnoughMemoryError: a protein does not fit into memory, and `on_failure` is None.
        RuntimeError: a runner could not embed a protein, and `on_failure` is None.
    """
    where = InProcessRunner(turbo) if runner is None else runner
    rows = encode_rows(turbo.codes, sequences)
    batches = embedding_batches(turbo, rows, request, protein_tokens(toks_per_batch, turbo, where.devices), done)
    pieces = [[ProteinRecord("", sequences[index]) for index in batch] for batch in batches]
    units = [sum(len(record.sequence) for record in piece) for piece in pieces]

    def results() -> Iterator[list[tuple[int, ProteinEmbedding]]]:
        for number, embedded in where.run(EmbedTask(request), pieces, stage="embed", units=units):
            for index, reason in sorted((batches[number][row], reason) for row, reason in embedded.failed.items()):
                if on_failure is not None:
                    on_failure(index, reason)
                elif runner is None:
                    raise NotEnoughMemoryError(f"sequence {index + 1}: {reason}")
                else:
                    raise RuntimeError(f"sequence {index + 1} was not embedded: {reason}")
            yield [(batches[number][row], embedding) for row, embedding in embedded.embeddings.items()]

    return results()


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
    lengths = [len(row) for row in rows]
    if windows is not None:
        lengths = [max(n, toks_per_batch + 1) if windows.splits(n - 2) else n for n in lengths]
    reach = math.inf if windows is None else windows.reach
    warn_if_long((int(min(len(row) - 2, reach)) for row in rows), turbo.model.family, stacklevel=4)
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
        launched: deque[Callable[[], Embedded]] = deque()
        for piece in pieces:
            launched.append(self._launch(turbo, piece))
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

    def _launch(self, turbo: ContextModel, piece: Sequence[ProteinRecord]) -> Callable[[], Embedded]:
        """Launch a batch, in halves if it does not fit into memory."""
        rows = encode_rows(turbo.codes, [record.sequence[: self.length] for record in piece])
        result = Embedded({})

        def fail(row: int, error: Exception) -> None:
            result.failed[row] = too_large(len(rows[row]) - 2, turbo.model.device)

        halves = halve_until_it_fits(lambda part: _embed_batch(turbo, rows, part, self.request), range(len(rows)), fail)

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
    turbo: ContextModel, rows: Sequence[TokenRow], batch: Sequence[int], request: EmbeddingRequest
) -> Callable[[], list[tuple[int, ProteinEmbedding]]]:
    """Launch a batch. The function returned waits for it and returns its embeddings."""
    lengths = [len(rows[index]) - 2 for index in batch]
    _check_memory(turbo, lengths, request)
    if request.windows is not None and request.windows.splits(lengths[0]):
        [index] = batch
        parts = embed_in_windows(turbo, rows[index][1:-1], request.windows, request.layers, request.include)
        return lambda: [(index, ProteinEmbedding(**parts, contacts=None, cache=None))]
    device = turbo.model.device
    input_ids, attention_mask = (to_device(x, device) for x in turbo.codes.batch([rows[index] for index in batch]))
    contacts = caches = copied = None
    # First, while the memory that was found free is still free.
    if "cache" in request.include:
        caches = _caches(turbo, [rows[index] for index in batch], request.store)
    found: dict[str, dict[int, Tensor]] = {}
    if request.include & {"mean", "per_tok", "bos"}:
        for layer, states in _hidden_states(turbo, input_ids, attention_mask, lengths, request.layers).items():
            residues = [states[row, 1 : n + 1] for row, n in enumerate(lengths)]
            if "per_tok" in request.include:
                # Without padding, and converted on the device, which is fastest.
                found.setdefault(_PER_TOK, {})[layer] = to_host(torch.cat(residues).float())
            if "mean" in request.include:
                means = torch.stack([x.float().mean(dim=0) for x in residues])
                found.setdefault(_MEAN, {})[layer] = to_host(means)
            if "bos" in request.include:
                found.setdefault(_BOS, {})[layer] = to_host(states[:, 0].float())
    if "contacts" in request.include:
        contacts = to_host(turbo.model.base_model.predict_contacts(input_ids, attention_mask))
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
                kind: {layer: x[residues if kind == _PER_TOK else row].clone() for layer, x in layers.items()}
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
    config, tokens = turbo.model.config, max(lengths) + 2
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
    turbo: ContextModel, input_ids: Tensor, attention_mask: Tensor, lengths: Sequence[int], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Hidden states [batch, n, hidden_size] of the given layers; `lengths` counts residues per row."""
    last = turbo.model.config.num_hidden_layers
    # The states of all layers take many times the memory of the last one's.
    output = turbo.model.base_model(
        input_ids,
        attention_mask,
        output_hidden_states=set(layers) != {last},
        row_lengths=[length + 2 for length in lengths],
    )
    if output.hidden_states is None:
        assert set(layers) == {last}
        return {last: output.last_hidden_state}
    return {layer: output.hidden_states[layer] for layer in layers}


def _layers(repr_layers: Sequence[int], last: int) -> tuple[int, ...]:
    """Layers numbered from 0, each once, in the requested order."""
    if not repr_layers:
        raise ValueError("`repr_layers` must name at least one layer")
    for layer in repr_layers:
        if not -(last + 1) <= layer <= last:
            raise ValueError(f"`repr_layers` must lie in {-(last + 1)} to {last} for this model, got {layer}")
    return tuple(dict.fromkeys(layer % (last + 1) for layer in repr_layers))
