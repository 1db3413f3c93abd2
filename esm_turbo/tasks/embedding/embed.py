"""Embeddings of proteins as `esm-extract` makes them, and their compressed caches."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from esm_turbo.config import DEFAULT_TOKS_PER_BATCH
from esm_turbo.proteins.batches import TokenRow, encode_rows, remaining_batches
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.options import Include
from esm_turbo.tasks.embedding.windows import Windows, embed_in_windows

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache

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
        cache: what `ContextModel.prefill` makes of the protein.
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
        windows: how long proteins are cut; None computes every protein whole.
    """

    layers: tuple[int, ...]
    include: frozenset[str]
    windows: Windows | None = None

    @classmethod
    def of(
        cls, turbo: ContextModel, repr_layers: Sequence[int], include: Iterable[str], windows: Windows | None = None
    ) -> EmbeddingRequest:
        """Checks what was asked for.

        Raises:
            ValueError: nothing is asked for, there is no such layer, an item of `include` is unknown, caches are
                asked for and the model cannot write them, or windows cannot give what is asked for.
        """
        wanted = frozenset([include] if isinstance(include, str) else include)
        allowed = get_args(Include)
        if not wanted or not wanted <= set(allowed):
            raise ValueError(f"`include` must be some of {list(allowed)}, got {sorted(wanted)}")
        layers = _layers(repr_layers, turbo.model.config.num_hidden_layers)
        if windows is not None and wanted & {"contacts", "cache"}:
            raise ValueError(
                f"window by window there are no contacts and no cache of a whole protein, got {sorted(wanted)}"
            )
        if "cache" in wanted or (windows is not None and windows.memory):
            turbo.model.new_cache()
        return cls(layers, wanted, windows)


def embed(
    turbo: ContextModel,
    sequences: Sequence[str],
    repr_layers: Sequence[int] = (-1,),
    include: Iterable[str] = ("mean", "per_tok"),
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    return_cache: bool = False,
    windows: Windows | None = None,
) -> list[ProteinEmbedding]:
    """Embeds proteins; `iter_embeddings` does the same without keeping all results.

    Args:
        turbo: the model and its tokenizer.
        sequences: residues; `<mask>` may stand for one.
        repr_layers: from 0, the input of the first layer, to the number of layers; negative ones count from the end.
        include: some of `mean`, `per_tok`, `bos` (`<cls>`), `contacts` and `cache`.
        toks_per_batch: padded tokens of a batch; a longer protein forms a batch of its own.
        return_cache: the same as `cache` in `include`.
        windows: how long proteins are cut; None computes every protein whole.

    Returns:
        One a sequence, in their order.

    Raises:
        ValueError: a sequence is empty or has letters that are no residues, there is no such layer, an item of
            `include` is unknown, or caches are asked for under a preset that needs a calibration and there is none.
    """
    include = [include] if isinstance(include, str) else list(include)
    request = EmbeddingRequest.of(turbo, repr_layers, [*include, *(["cache"] if return_cache else [])], windows)
    found: dict[int, ProteinEmbedding] = {}
    for batch in iter_embeddings(turbo, sequences, request, toks_per_batch):
        found.update(batch)
    return [found[index] for index in range(len(sequences))]


def embedding_settings(turbo: ContextModel, request: EmbeddingRequest) -> dict[str, Any]:
    """What decides the values of embeddings, JSON values: the same settings give the same, up to rounding."""
    settings: dict[str, Any] = {
        "model": turbo.name,
        "weights": _digest((name, p.detach().reshape(-1)[:_DIGESTED]) for name, p in turbo.model.named_parameters()),
        "dtype": str(turbo.model.dtype).removeprefix("torch."),
        "repr_layers": sorted(request.layers),
        "include": sorted(request.include),
    }
    if request.windows is not None:
        settings["windows"] = asdict(request.windows)
    if "cache" in request.include or (request.windows is not None and request.windows.memory):
        codec = turbo.model.new_cache().codec
        settings |= {"cache": codec.config.to_dict(), "codec": _digest(sorted(codec.state.items()))}
    return settings


def iter_embeddings(
    turbo: ContextModel,
    sequences: Sequence[str],
    request: EmbeddingRequest,
    toks_per_batch: int = DEFAULT_TOKS_PER_BATCH,
    *,
    done: Container[int] = (),
    on_failure: Callable[[int, str], None] | None = None,
) -> Iterator[list[tuple[int, ProteinEmbedding]]]:
    """Embeds proteins batch by batch, the longest first, in memory that does not grow with their number.

    Everything is checked before the first batch. A batch that does not fit into memory is halved.

    Args:
        turbo: the model and its tokenizer.
        sequences: as for `embed`.
        request: what to compute.
        toks_per_batch: as for `embed`.
        done: indices that are left out; the batches of the others stay what they are without it, see
            `remaining_batches`.
        on_failure: called with the index of a protein that does not fit into memory and the reason; None raises.

    Yields:
        The proteins of a batch, each with its index in `sequences`.

    Raises:
        ValueError: a sequence is empty or has letters that are no residues.
        MemoryError: a protein does not fit into memory, and `on_failure` is None.
    """
    rows = encode_rows(turbo.codes, sequences)
    batches = remaining_batches([_size(row, request, toks_per_batch) for row in rows], toks_per_batch, done)
    sight = math.inf if request.windows is None else request.windows.sight
    warn_if_long((int(min(len(row) - 2, sight)) for row in rows), stacklevel=3)
    return _in_turn(turbo, sequences, rows, batches, request, on_failure)


def _size(row: TokenRow, request: EmbeddingRequest, toks_per_batch: int) -> int:
    """Tokens that a protein counts for: one that is cut into windows forms a batch of its own."""
    cut = request.windows is not None and request.windows.cuts(len(row) - 2)
    return max(len(row), toks_per_batch + 1) if cut else len(row)


def _in_turn(
    turbo: ContextModel,
    sequences: Sequence[str],
    rows: Sequence[TokenRow],
    batches: Iterable[Sequence[int]],
    request: EmbeddingRequest,
    on_failure: Callable[[int, str], None] | None,
) -> Iterator[list[tuple[int, ProteinEmbedding]]]:
    # A device computes the next batch while the caller writes this one; a CPU has nothing to gain from that.
    ahead = turbo.model.device.type == "cuda"
    waiting: list[_Pending | _Done] = []
    for batch in batches:
        launched = _embed_or_halve(turbo, sequences, rows, batch, request, on_failure)
        if waiting:
            yield [pair for pending in waiting for pair in pending.collect()]
        waiting = launched
        if waiting and not ahead:
            yield [pair for pending in waiting for pair in pending.collect()]
            waiting = []
    if waiting:
        yield [pair for pending in waiting for pair in pending.collect()]


def _embed_or_halve(
    turbo: ContextModel,
    sequences: Sequence[str],
    rows: Sequence[TokenRow],
    batch: Sequence[int],
    request: EmbeddingRequest,
    on_failure: Callable[[int, str], None] | None,
) -> list[_Pending | _Done]:
    try:
        return [_embed_batch(turbo, sequences, rows, batch, request)]
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
    # Outside of the handler, which would keep the failed batch's tensors alive.
    if len(batch) > 1:
        halves = (batch[: len(batch) // 2], batch[len(batch) // 2 :])
        return [
            pending for half in halves for pending in _embed_or_halve(turbo, sequences, rows, half, request, on_failure)
        ]
    [index] = batch
    reason = (
        f"its {len(rows[index]) - 2} residues need more memory than {turbo.model.device} has;"
        " cut it, ask for less of it, or take a device with more"
    )
    if on_failure is None:
        raise MemoryError(f"sequence {index + 1}: {reason}")
    on_failure(index, reason)
    return []


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch has a class for devices only.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


@torch.no_grad()
def _embed_batch(
    turbo: ContextModel,
    sequences: Sequence[str],
    rows: Sequence[TokenRow],
    batch: Sequence[int],
    request: EmbeddingRequest,
) -> _Pending | _Done:
    if request.windows is not None and request.windows.cuts(len(rows[batch[0]]) - 2):
        [index] = batch
        residues = rows[index][1:-1]
        return _Done(index, embed_in_windows(turbo, residues, request.windows, request.layers, request.include))
    device = turbo.model.device
    input_ids, attention_mask = (x.to(device) for x in turbo.codes.batch([rows[index] for index in batch]))
    lengths = [len(rows[index]) - 2 for index in batch]
    pending = _Pending(batch, lengths, request)
    if request.include & {"mean", "per_tok", "bos"}:
        for layer, states in _hidden_states(turbo, input_ids, attention_mask, lengths, request.layers).items():
            pending.take(layer, states)
    if "contacts" in request.include:
        pending.contacts = _to_host(turbo.model.esm.predict_contacts(input_ids, attention_mask))
    if "cache" in request.include:
        pending.caches = turbo.prefill([sequences[index] for index in batch])
    pending.launched(device)
    return pending


class _Pending:
    """A batch on its way from the device: what was asked for of its proteins, all of a kind in one tensor."""

    def __init__(self, batch: Sequence[int], lengths: Sequence[int], request: EmbeddingRequest) -> None:
        self.batch = batch
        self.lengths = lengths
        self.request = request
        self.per_tok: dict[int, Tensor] = {}
        self.mean: dict[int, Tensor] = {}
        self.bos: dict[int, Tensor] = {}
        self.contacts: Tensor | None = None
        self.caches: TurboKVCache | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, layer: int, states: Tensor) -> None:
        """Hidden states [batch, n, hidden_size] of one layer."""
        residues = [states[row, 1 : n + 1] for row, n in enumerate(self.lengths)]
        if "per_tok" in self.request.include:
            # Without the padding, and converted where that is quickest.
            self.per_tok[layer] = _to_host(torch.cat(residues).float())
        if "mean" in self.request.include:
            self.mean[layer] = _to_host(torch.stack([x.float().mean(dim=0) for x in residues]))
        if "bos" in self.request.include:
            self.bos[layer] = _to_host(states[:, 0].float())

    def launched(self, device: torch.device) -> None:
        """To be called when all work is on its way."""
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def collect(self) -> list[tuple[int, ProteinEmbedding]]:
        """Waits for the batch, and gives each protein tensors of its own, so that none keeps the batch alive."""
        if self._copied is not None:
            self._copied.synchronize()
        ends = list(itertools.accumulate(self.lengths))
        embeddings = []
        for row, (index, n) in enumerate(zip(self.batch, self.lengths, strict=True)):
            parts: dict[str, dict[int, Tensor]] = {}
            if self.per_tok:
                own = slice(ends[row] - n, ends[row])
                parts["representations"] = {layer: x[own].clone() for layer, x in self.per_tok.items()}
            if self.mean:
                parts["mean_representations"] = {layer: x[row].clone() for layer, x in self.mean.items()}
            if self.bos:
                parts["bos_representations"] = {layer: x[row].clone() for layer, x in self.bos.items()}
            embedding = ProteinEmbedding(
                **parts,
                contacts=None if self.contacts is None else self.contacts[row, :n, :n].to(torch.float32, copy=True),
                cache=None if self.caches is None else self.caches.select(row),
            )
            embeddings.append((index, embedding))
        return embeddings


class _Done:
    """A protein cut into windows, which is complete when it comes back."""

    def __init__(self, index: int, parts: dict[str, dict[int, Tensor]]) -> None:
        self.embedding = (index, ProteinEmbedding(**parts, contacts=None, cache=None))

    def collect(self) -> list[tuple[int, ProteinEmbedding]]:
        return [self.embedding]


def _hidden_states(
    turbo: ContextModel, input_ids: Tensor, attention_mask: Tensor, lengths: Sequence[int], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Hidden states [batch, n, hidden_size] of some layers; `lengths` counts residues per row."""
    last = turbo.model.config.num_hidden_layers
    # The states of all layers together are many times the last one's memory.
    output = turbo.model.esm(
        input_ids,
        attention_mask,
        output_hidden_states=set(layers) != {last},
        row_lengths=[length + 2 for length in lengths],
    )
    if output.hidden_states is None:
        return {last: output.last_hidden_state}
    return {layer: output.hidden_states[layer] for layer in layers}


def _to_host(x: Tensor) -> Tensor:
    """A copy on the CPU; from a CUDA device it is still under way, into pinned memory, when this returns."""
    if x.device.type != "cuda":
        return x.to("cpu")
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _layers(repr_layers: Sequence[int], last: int) -> tuple[int, ...]:
    """Layers numbered from 0, each once, in the order asked for."""
    if not repr_layers:
        raise ValueError("`repr_layers` must name at least one layer")
    for layer in repr_layers:
        if not -(last + 1) <= layer <= last:
            raise ValueError(f"`repr_layers` must lie in {-(last + 1)} to {last} for this model, got {layer}")
    return tuple(dict.fromkeys(layer % (last + 1) for layer in repr_layers))
