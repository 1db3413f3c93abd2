"""Embeddings of proteins as `esm-extract` makes them, and their compressed caches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from .calibration_run import model_name
from .fasta import token_batches
from .limits import warn_if_long
from .options import Include

if TYPE_CHECKING:
    from .kv_cache import TurboKVCache
    from .turbo_esm import TurboEsm

# Elements of each parameter that tell one set of weights from another; all of them would take minutes to hash.
_DIGESTED = 256


@dataclass(frozen=True)
class ProteinEmbedding:
    """What was asked of one protein, named as in the files of `esm-extract`; None where it was not asked.

    Tensors are float32 on the CPU. L is the number of residues; layer 0 is the input of the first layer, the last
    layer is taken after the model's final layer norm. Layers are numbered from 0, also where they were asked for
    with negative numbers.

    Attributes:
        representations: per layer the hidden states of the residues, [L, hidden_size].
        mean_representations: per layer their mean over the residues, [hidden_size].
        bos_representations: per layer the hidden state of `<cls>`, [hidden_size].
        contacts: predicted contact probabilities, [L, L].
        cache: what `TurboEsm.prefill` makes of the protein.
    """

    representations: dict[int, Tensor] | None = None
    mean_representations: dict[int, Tensor] | None = None
    bos_representations: dict[int, Tensor] | None = None
    contacts: Tensor | None = None
    cache: TurboKVCache | None = None

    def is_finite(self) -> bool:
        """Whether no tensor holds NaN or infinity."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by a flat name, such as `mean_representations.12`; without the cache."""
        flat: dict[str, Tensor] = {}
        for kind in ("representations", "mean_representations", "bos_representations"):
            flat |= {f"{kind}.{layer}": tensor for layer, tensor in (getattr(self, kind) or {}).items()}
        return flat if self.contacts is None else flat | {"contacts": self.contacts}


@dataclass(frozen=True)
class EmbeddingRequest:
    """What is computed of every protein.

    Attributes:
        layers: whose hidden states are taken, from 0 to the number of layers.
        include: see `embed`.
    """

    layers: tuple[int, ...]
    include: frozenset[str]

    @classmethod
    def of(cls, turbo: TurboEsm, repr_layers: Sequence[int], include: Iterable[str]) -> EmbeddingRequest:
        """Checks what was asked for.

        Raises:
            ValueError: nothing is asked for, there is no such layer, an item of `include` is unknown, or caches are
                asked for and the model cannot write them.
        """
        wanted = frozenset([include] if isinstance(include, str) else include)
        allowed = get_args(Include)
        if not wanted or not wanted <= set(allowed):
            raise ValueError(f"`include` must be some of {list(allowed)}, got {sorted(wanted)}")
        layers = _layers(repr_layers, turbo.model.config.num_hidden_layers)
        if "cache" in wanted:
            turbo.model.new_cache()
        return cls(layers, wanted)


def embed(
    turbo: TurboEsm,
    sequences: Sequence[str],
    repr_layers: Sequence[int] = (-1,),
    include: Iterable[str] = ("mean", "per_tok"),
    toks_per_batch: int = 4096,
    return_cache: bool = False,
) -> list[ProteinEmbedding]:
    """Embeds proteins; `iter_embeddings` does the same without keeping all results.

    Args:
        turbo: the model and its tokenizer.
        sequences: residues; `<mask>` may stand for one.
        repr_layers: from 0, the input of the first layer, to the number of layers; negative ones count from the end.
        include: some of `mean`, `per_tok`, `bos` (`<cls>`), `contacts` and `cache`.
        toks_per_batch: padded tokens of a batch; a longer protein forms a batch of its own.
        return_cache: the same as `cache` in `include`.

    Returns:
        One a sequence, in their order.

    Raises:
        ValueError: a sequence is empty or has letters that are no residues, there is no such layer, an item of
            `include` is unknown, or caches are asked for under a preset that needs a calibration and there is none.
    """
    include = [include] if isinstance(include, str) else list(include)
    request = EmbeddingRequest.of(turbo, repr_layers, [*include, *(["cache"] if return_cache else [])])
    found: dict[int, ProteinEmbedding] = {}
    for batch in iter_embeddings(turbo, sequences, request, toks_per_batch):
        found.update(batch)
    return [found[index] for index in range(len(sequences))]


def embedding_settings(turbo: TurboEsm, request: EmbeddingRequest) -> dict[str, Any]:
    """What decides the values of embeddings, JSON values: the same settings give the same, up to rounding."""
    settings: dict[str, Any] = {
        "model": model_name(turbo),
        "weights": _digest((name, p.detach().reshape(-1)[:_DIGESTED]) for name, p in turbo.model.named_parameters()),
        "dtype": str(turbo.model.dtype).removeprefix("torch."),
        "repr_layers": sorted(request.layers),
        "include": sorted(request.include),
    }
    if "cache" in request.include:
        codec = turbo.model.new_cache().codec
        settings |= {"cache": codec.config.to_dict(), "codec": _digest(sorted(codec.state.items()))}
    return settings


def iter_embeddings(
    turbo: TurboEsm, sequences: Sequence[str], request: EmbeddingRequest, toks_per_batch: int = 4096
) -> Iterator[list[tuple[int, ProteinEmbedding]]]:
    """Embeds proteins batch by batch, the longest first, in memory that does not grow with their number.

    Everything is checked before the first batch.

    Args:
        turbo: the model and its tokenizer.
        sequences: as for `embed`.
        request: what to compute.
        toks_per_batch: as for `embed`.

    Yields:
        The proteins of a batch, each with its index in `sequences`.

    Raises:
        ValueError: a sequence is empty or has letters that are no residues.
    """
    lengths = [len(_tokens(turbo, sequence, index)) for index, sequence in enumerate(sequences)]
    batches = token_batches(lengths, toks_per_batch)
    warn_if_long((length - 2 for length in lengths), stacklevel=3)
    # The longest first: what does not fit into memory is known at once.
    return (_embed_batch(turbo, sequences, batch, request) for batch in reversed(batches))


@torch.no_grad()
def _embed_batch(
    turbo: TurboEsm, sequences: Sequence[str], batch: Sequence[int], request: EmbeddingRequest
) -> list[tuple[int, ProteinEmbedding]]:
    rows = [_tokens(turbo, sequences[index], index) for index in batch]
    input_ids, attention_mask = (x.to(turbo.model.device) for x in turbo.codes.batch(rows))
    states = contacts = caches = None
    if request.include & {"mean", "per_tok", "bos"}:
        states = _hidden_states(turbo, input_ids, attention_mask, request.layers)
    if "contacts" in request.include:
        contacts = turbo.model.esm.predict_contacts(input_ids, attention_mask)
    if "cache" in request.include:
        caches = turbo.prefill([sequences[index] for index in batch])
    embeddings = []
    for row, (index, tokens) in enumerate(zip(batch, rows, strict=True)):
        n = len(tokens) - 2
        parts = {}
        if states is not None:
            own = {layer: _own(state[row, : n + 1]) for layer, state in states.items()}
            parts = _representations(own, request.include)
        embedding = ProteinEmbedding(
            **parts,
            contacts=None if contacts is None else _own(contacts[row, :n, :n]),
            cache=None if caches is None else caches.select(row),
        )
        embeddings.append((index, embedding))
    return embeddings


def _hidden_states(
    turbo: TurboEsm, input_ids: Tensor, attention_mask: Tensor, layers: Sequence[int]
) -> dict[int, Tensor]:
    """Hidden states [batch, n, hidden_size] of some layers."""
    last = turbo.model.config.num_hidden_layers
    # The states of all layers together are many times the last one's memory.
    output = turbo.model.esm(input_ids, attention_mask, output_hidden_states=set(layers) != {last})
    if output.hidden_states is None:
        return {last: output.last_hidden_state}
    return {layer: output.hidden_states[layer] for layer in layers}


def _representations(states: dict[int, Tensor], include: frozenset[str]) -> dict[str, dict[int, Tensor]]:
    """What is asked for of hidden states [1 + L, hidden_size] of `<cls>` and the residues."""
    parts = {}
    if "per_tok" in include:
        parts["representations"] = {layer: x[1:].clone() for layer, x in states.items()}
    if "mean" in include:
        parts["mean_representations"] = {layer: x[1:].mean(dim=0) for layer, x in states.items()}
    if "bos" in include:
        parts["bos_representations"] = {layer: x[0].clone() for layer, x in states.items()}
    return parts


def _own(x: Tensor) -> Tensor:
    """A float32 copy on the CPU with memory of its own, so that no whole batch is kept alive, or saved, by a part."""
    return x.to("cpu", torch.float32, copy=True)


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tokens(turbo: TurboEsm, sequence: str, index: int) -> list[int]:
    return [turbo.codes.cls, *turbo.codes.encode(sequence, f"sequence {index + 1}"), turbo.codes.eos]


def _layers(repr_layers: Sequence[int], last: int) -> tuple[int, ...]:
    """Layers numbered from 0, each once, in the order asked for."""
    if not repr_layers:
        raise ValueError("`repr_layers` must name at least one layer")
    for layer in repr_layers:
        if not -(last + 1) <= layer <= last:
            raise ValueError(f"`repr_layers` must lie in {-(last + 1)} to {last} for this model, got {layer}")
    return tuple(dict.fromkeys(layer % (last + 1) for layer in repr_layers))
