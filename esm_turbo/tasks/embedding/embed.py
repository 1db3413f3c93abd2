"""Embeddings of proteins, as `esm-extract` makes them, and their compressed caches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from esm_turbo.context_model import Sequences, as_list
from esm_turbo.files.identity import lasting_identity, model_identity
from esm_turbo.files.tensor_digests import tensors_digest
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.proteins.batches import encode_rows
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.context_sources import ContextSource
from esm_turbo.tasks.common.forwards import default_config, protein_tokens
from esm_turbo.tasks.common.homologs import QueryContext
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner
from esm_turbo.tasks.common.same_model import refuse_seen_change, run_on_model
from esm_turbo.tasks.embedding.batches import EmbedTask, embedding_batches
from esm_turbo.tasks.embedding.request import EmbeddingRequest, ProteinEmbedding
from esm_turbo.tasks.embedding.windows import Windows

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel, Contexts


def embed(
    turbo: ContextModel,
    sequences: Sequences,
    repr_layers: Sequence[int] = (-1,),
    include: Sequence[str] = ("mean", "per_tok"),
    toks_per_batch: int | None = None,
    return_cache: bool = False,
    *,
    window: int | None = None,
    overlap: int | None = None,
    memory: int | None = None,
    store: ContextSource | None = None,
    devices: str | Sequence[str] | Runner | None = None,
    context: Contexts | None = None,
) -> list[ProteinEmbedding]:
    """Embed proteins as `esm-extract` does. `iter_embeddings` does the same without keeping all results.

    If any of `window`, `overlap` and `memory` is given, proteins longer than `window` run window by window, in memory
    that does not grow with their length; see `Windows.of`.

    Args:
        sequences: residues; `<mask>` may stand for one.
        repr_layers: from 0, the input of the first layer, to the number of layers; negative ones count from the end.
        include: some of `mean`, `per_tok`, `bos` (`<cls>`), `contacts` and `cache`.
        toks_per_batch: padded tokens per batch; None is 16,384 on CUDA, and else 4,096. A longer protein forms a batch
            of its own.
        return_cache: same as `cache` in `include`.
        window: residues per window.
        overlap: residues that consecutive windows share.
        memory: residues before a window that it sees through the compressed cache.
        store: with caches, a `ContextStore` whose contexts are used and to which missing ones are added.
        devices: where copies of the model share the work, as for `score_pairs`; None is this process.
        context: of a family with exact contexts, such as E1, homologs that every protein is read after, separated by
            commas, or a cache of one row of them. Results are those of the protein alone; X in it is read.

    Returns:
        One embedding per sequence, in the same order.

    Raises:
        ValueError: a sequence is empty or has a letter that is not a residue, a layer does not exist, an item of
            `include` is unknown, caches are requested under a preset that needs a calibration and there is none, or
            contacts are requested of a model whose contact head was never trained.
        RuntimeError: a sequence could not be embedded on `devices`.
    """
    sequences, include = as_list(sequences), [include] if isinstance(include, str) else list(include)
    windows, runner = Windows.of(window, overlap, memory), turbo.runner(devices)
    include += ["cache"] if return_cache else []
    request = EmbeddingRequest.of(turbo, repr_layers, include, windows, store, context)
    if runner is not None and request.context is not None and request.context.cache is not None:
        raise ValueError("`devices` reads no cache, which lies on the device of one process: give the homologs")
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
        ValueError: the model cannot be identified, see `ModelIdentity.check_lasting`, or the context is in a pool.
    """
    identity = lasting_identity(turbo.model)
    settings: dict[str, Any] = {
        "model": turbo.name,
        "weights": identity.digest,
        "probe": identity.probe,
        "dtype": str(turbo.model.dtype).removeprefix("torch."),
        "repr_layers": sorted(request.layers),
        "include": sorted(request.include),
    }
    if request.windows is not None:
        settings["windows"] = asdict(request.windows)
    if request.context is not None:
        cache, ids = request.context.cache, hashlib.sha256(bytes(request.context.ids)).hexdigest()
        codec = turbo.model.base_model.codec(default_config(turbo) if cache is None else cache.config)
        settings["context"] = {"ids": ids, "preset": codec.config.to_dict()}
        if codec.state:
            settings["context"]["codec"] = tensors_digest(sorted(codec.state.items()))
        if cache is not None:
            # The same tokens may be stored at other positions, after others, or without refinements.
            settings["context"]["contents"] = tensors_digest(sorted(cache.select(0).tensors_to_join().items()))
    if request.writes_contexts:
        codec = turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
        settings |= {"cache": codec.config.to_dict(), "codec": tensors_digest(sorted(codec.state.items()))}
    return settings


def iter_embeddings(
    turbo: ContextModel,
    sequences: Sequences,
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
        ValueError: a sequence is empty or has a letter that is not a residue, or the model changes between two batches.
        NotEnoughMemoryError: a protein does not fit into memory, and `on_failure` is None.
        RuntimeError: a runner could not embed a protein, and `on_failure` is None.
    """
    where, sequences = InProcessRunner(turbo) if runner is None else runner, as_list(sequences)
    rows = encode_rows(turbo.codes, sequences)
    for number, row in enumerate(rows, start=1):
        (request.context or QueryContext(())).check_query(turbo, row, f"sequence {number}")
    batches = embedding_batches(turbo, rows, request, protein_tokens(toks_per_batch, turbo, where.devices), done)
    pieces = [[ProteinRecord("", sequences[index]) for index in batch] for batch in batches]
    units = [sum(len(record.sequence) for record in piece) for piece in pieces]

    def results() -> Iterator[list[tuple[int, ProteinEmbedding]]]:
        begun = model_identity(turbo.model.base_model) if len(pieces) > 1 else None
        for number, embedded in run_on_model(turbo, where, EmbedTask(request), pieces, stage="embed", units=units):
            # Whoever takes batches may change the model between two.
            if begun is not None:
                refuse_seen_change(turbo.model.base_model, begun)
            for index, reason in sorted((batches[number][row], reason) for row, reason in embedded.failed.items()):
                if on_failure is not None:
                    on_failure(index, reason)
                elif runner is None:
                    raise NotEnoughMemoryError(f"sequence {index + 1}: {reason}")
                else:
                    raise RuntimeError(f"sequence {index + 1} was not embedded: {reason}")
            yield [(batches[number][row], embedding) for row, embedding in embedded.embeddings.items()]

    return results()
