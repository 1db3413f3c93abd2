"""What an embedding of a protein is, and what is requested of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from esm_turbo.files.tabular import named
from esm_turbo.model.heads import check_head, check_reads_on
from esm_turbo.tasks.common.context_sources import ContextSource, check_store
from esm_turbo.tasks.common.homologs import QueryContext, query_contexts
from esm_turbo.tasks.common.options import Include
from esm_turbo.tasks.embedding.windows import Windows

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel, Contexts
    from esm_turbo.kv_cache import TurboKVCache

RESULT_NAMES = {
    "per_tok": "representations",
    "mean": "mean_representations",
    "bos": "bos_representations",
    "contacts": "contacts",
}
"""Names of the results of an embedding, as `include` requests them."""
PER_TOK, MEAN, BOS, _ = RESULT_NAMES.values()


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
        for kind in (PER_TOK, MEAN, BOS):
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
        context: homologs that every protein is read after. `embed_records` knows a cache of them by its contents:
            computed again, with other last bits, it is another context.
    """

    layers: tuple[int, ...]
    include: frozenset[str]
    windows: Windows | None = None
    store: ContextSource | None = None
    context: QueryContext | None = None

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
        context: Contexts | None = None,
    ) -> EmbeddingRequest:
        """Check a request; the arguments are those of `embed`.

        Raises:
            ValueError: nothing is requested, a layer does not exist, an item of `include` is unknown, caches are
                requested and the model cannot write them, contacts are requested and the model's contact head was
                never trained, the results are not available in windows, a store is given and no caches are
                requested, or the context is invalid, not a single one, or the family reads none.
        """
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
        if windows is not None or "cache" in items:
            check_reads_on(turbo.model.base_model, "windows and caches of proteins")
        contexts = query_contexts(turbo, context, "full")
        if len(contexts) > 1:
            raise ValueError(f"proteins are embedded after one context, got {len(contexts)}")
        check_store(store)
        if store is not None and "cache" not in items:
            raise ValueError(f"a store keeps caches: include 'cache', got {sorted(items)}")
        request = cls(layers, items, windows, store, *contexts)
        if "cache" in items:
            turbo.model.new_cache()
        elif request.writes_contexts:
            turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
        return request


def _layers(repr_layers: Sequence[int], last: int) -> tuple[int, ...]:
    """Layers numbered from 0, each once, in the requested order."""
    repr_layers = list(repr_layers)
    if not repr_layers:
        raise ValueError("`repr_layers` must name at least one layer")
    for layer in repr_layers:
        if layer not in range(-(last + 1), last + 1):
            raise ValueError(f"`repr_layers` must lie in {-(last + 1)} to {last} for this model, got {layer}")
    return tuple(dict.fromkeys(int(layer) % (last + 1) for layer in repr_layers))
