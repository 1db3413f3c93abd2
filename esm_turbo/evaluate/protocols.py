"""The two test protocols for stored contexts: leave-one-out, and extension at the end.

`results.Evaluation` defines the three computations that they compare: full, frozen and turbo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.contexts import as_outputs, prefill, to_float64
from esm_turbo.evaluate.metrics import LayerErrors, Outputs, TokenErrors
from esm_turbo.proteins.batches import token_batches
from esm_turbo.proteins.homologs import SEPARATOR, encode_homologs
from esm_turbo.tasks.common.forwards import FROZEN

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.model.masked_lm import CachedMaskedLM
    from esm_turbo.proteins.tokens import TokenCodes

# Rows per leave-one-out forward pass: with a context of a thousand residues, scores take a few megabytes per head.
_ROWS = 256
# Small, so that the proteins of a batch are of similar length and need little padding.
_TOKENS_PER_BATCH = 1024
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Protein:
    """One protein to evaluate on.

    Attributes:
        name: for messages.
        sequence: residues, upper case.
        structural_class: None if unknown.
        homologs: that it is read after, separated by commas; only for exact contexts.
    """

    name: str
    sequence: str
    structural_class: str | None = None
    homologs: str = ""

    @classmethod
    def of(cls, name: str, text: str, structural_class: str | None = None) -> Protein:
        """The last of several sequences after the others."""
        homologs, _, sequence = text.rpartition(SEPARATOR)
        return cls(name, sequence, structural_class, homologs)

    @property
    def text(self) -> str:
        """Inverse of `of`."""
        return SEPARATOR.join(filter(None, (self.homologs, self.sequence)))

    def __len__(self) -> int:
        return len(self.sequence)

    def token_ids(self, codes: TokenCodes) -> list[int]:
        """Token ids of the whole protein, special ones included, without its homologs."""
        return codes.whole(codes.encode(self.sequence, self.name))

    def context_ids(self, turbo: ContextModel) -> list[int]:
        """Token ids of the homologs; empty if there are none.

        Raises:
            ValueError: one is invalid, see `encode_homologs`.
        """
        limits = turbo.model.base_model.exact_contexts
        return encode_homologs(turbo.codes, self.homologs, self.name, limits) if limits and self.homologs else []


@dataclass
class Comparison:
    """Errors of one computation against another, collected protein by protein.

    Attributes:
        names: of the two computations, for messages.
        proteins: the protein of each residue.
        positions: of each residue among the tokens that were added with it, from 0; `<cls>` comes first.
        layers: errors of the hidden states by layer.
    """

    names: str
    proteins: list[Protein] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    layers: LayerErrors = field(default_factory=LayerErrors)
    _residues: list[TokenErrors] = field(default_factory=list)
    _specials: list[TokenErrors] = field(default_factory=list)

    def add(self, protein: Protein, reference: Outputs, other: Outputs, special: npt.NDArray[np.bool_]) -> None:
        """Add consecutive tokens of a protein.

        Args:
            protein: the protein.
            reference: outputs of n tokens.
            other: outputs of n tokens.
            special: True for tokens that are not residues, [n].

        Raises:
            ValueError: an output contains NaN or infinity.
        """
        try:
            errors = TokenErrors.compare(reference, other)
        except ValueError as error:
            raise ValueError(f"{self.names}, {protein.name}: {error}") from None
        self._residues.append(errors[~special])
        self._specials.append(errors[special])
        positions = np.flatnonzero(~special).tolist()
        self.positions += positions
        self.proteins += [protein] * len(positions)
        if reference.layers is not None and other.layers is not None:
            self.layers.add(reference.layers[:, ~special], other.layers[:, ~special])

    @property
    def residues(self) -> TokenErrors:
        return TokenErrors.join(self._residues)

    @property
    def special_tokens(self) -> TokenErrors:
        return TokenErrors.join(self._specials)

    def __len__(self) -> int:
        return len(self._residues)


@dataclass
class Arms:
    """The three comparisons, for several presets.

    Attributes:
        frozen_full: frozen against full: the freezing error.
        turbo_frozen: by preset, turbo against frozen: the quantisation error.
        turbo_full: by preset, turbo against full: the total error.
    """

    frozen_full: Comparison
    turbo_frozen: dict[str, Comparison]
    turbo_full: dict[str, Comparison]

    @classmethod
    def of(cls, presets: Iterable[str], protocol: str) -> Arms:
        return cls(
            Comparison(f"{protocol}, frozen against full"),
            {name: Comparison(f"{protocol}, {name} against frozen") for name in presets},
            {name: Comparison(f"{protocol}, {name} against full") for name in presets},
        )

    def add(
        self,
        protein: Protein,
        full: Outputs,
        frozen: Outputs,
        turbo: Iterable[tuple[str, Outputs]],
        special: npt.NDArray[np.bool_],
    ) -> None:
        """Add tokens of one protein from all computations, with `turbo` preset by preset; see `Comparison.add`."""
        self.frozen_full.add(protein, full, frozen, special)
        for name, outputs in turbo:
            self.turbo_frozen[name].add(protein, frozen, outputs, special)
            self.turbo_full[name].add(protein, full, outputs, special)


@torch.no_grad()
def leave_one_out(
    turbo: ContextModel,
    proteins: Sequence[Protein],
    configs: Mapping[str, TurboConfig],
    advance: Advance,
    *,
    layers: bool = True,
) -> Arms:
    """Extend the context of every token in turn, all other tokens of the protein, by that token.

    The token's own keys and values are exact, so that without quantisation every layer computes the same as the whole
    forward pass: frozen and full agree up to rounding.

    Args:
        turbo: the model with its calibration.
        proteins: to evaluate on.
        configs: the presets by name.
        advance: called with 1 after every protein.
        layers: compare the hidden states of all layers, too.
    """
    arms = Arms.of(configs, "leave-one-out")
    model = turbo.model
    for protein in proteins:
        input_ids = torch.tensor([protein.token_ids(turbo.codes)])
        output, caches = prefill(model, [FROZEN, *configs.values()], input_ids, torch.ones_like(input_ids))
        full = as_outputs(output, 0, slice(None), layers)
        del output
        frozen = extend_each_token(model, caches[FROZEN], input_ids[0], layers)
        # One after the other, since each holds the states of all layers.
        compressed = (
            (name, frozen if config == FROZEN else extend_each_token(model, caches[config], input_ids[0], layers))
            for name, config in configs.items()
        )
        arms.add(protein, full, frozen, compressed, np.isin(input_ids[0].numpy(), model.base_model.special_ids))
        advance(1)
    return arms


def extend_each_token(model: CachedMaskedLM, cache: TurboKVCache, input_ids: Tensor, layers: bool = True) -> Outputs:
    """Extend a cache of one row by each of its own tokens, with the stored copy of that token masked.

    Args:
        model: the model.
        cache: of the whole protein.
        input_ids: the protein's tokens, [n].
        layers: whether the outputs hold the states of all layers.

    Returns:
        Outputs of every token.
    """
    parts = []
    for start in range(0, len(input_ids), _ROWS):
        index = torch.arange(start, min(start + _ROWS, len(input_ids)))
        mask = torch.ones(len(index), len(input_ids) + 1, dtype=torch.int64)
        mask[torch.arange(len(index)), index] = 0
        output = model(
            input_ids[index, None].to(model.device),
            mask.to(model.device),
            index[:, None].to(model.device),
            past_key_values=cache,
            output_hidden_states=True,
        )
        parts.append(as_outputs(output, slice(None), 0, layers))
    return Outputs.join(parts)


@torch.no_grad()
def extend_at_end(
    turbo: ContextModel,
    proteins: Sequence[Protein],
    configs: Mapping[str, TurboConfig],
    ks: Sequence[int],
    ws: Sequence[int],
    advance: Advance,
) -> dict[tuple[int, int], Arms]:
    """Store all but the last k residues, and extend them by the last k and `<eos>`, with w residues refreshed.

    Args:
        turbo: the model with its calibration.
        proteins: to evaluate on; those of up to k residues are skipped.
        configs: the presets by name.
        ks: numbers of new residues.
        ws: numbers of refreshed residues.
        advance: called with the number of proteins done.

    Returns:
        The comparisons by numbers of new and of refreshed residues.
    """
    results = {(k, w): Arms.of(configs, f"extension by {k}, refresh {w}") for k in ks for w in ws}
    for batch in token_batches([len(protein) + 2 for protein in proteins], _TOKENS_PER_BATCH):
        group = [proteins[index] for index in batch]
        full, _ = prefill(turbo.model, [], *turbo.codes.batch([p.token_ids(turbo.codes) for p in group]))
        for k in ks:
            long = [(row, protein) for row, protein in enumerate(group) if len(protein) > k]
            if not long:
                continue
            expected = [as_outputs(full, row, slice(len(one) + 1 - k, len(one) + 2)) for row, one in long]
            own = [protein for _, protein in long]
            contexts = turbo.codes.batch([protein.token_ids(turbo.codes)[: -k - 1] for protein in own])
            _, caches = prefill(turbo.model, [FROZEN, *configs.values()], *contexts)
            for w in ws:
                frozen = _extended(turbo, caches[FROZEN], own, k, w)
                compressed = {
                    name: frozen if config == FROZEN else _extended(turbo, caches[config], own, k, w)
                    for name, config in configs.items()
                }
                for row, protein in enumerate(own):
                    outputs = [(name, rows[row]) for name, rows in compressed.items()]
                    results[k, w].add(protein, expected[row], frozen[row], outputs, np.arange(k + 1) == k)
        advance(len(batch))
    return results


def _extended(turbo: ContextModel, cache: TurboKVCache, proteins: Sequence[Protein], k: int, w: int) -> list[Outputs]:
    """Outputs of the last k residues and `<eos>` of each protein, w residues of its context refreshed."""
    output = turbo.extend(cache, [protein.sequence[-k:] for protein in proteins], refresh=w)
    pairs = zip(output.hidden_states, output.logits, strict=True)
    return [Outputs(to_float64(hidden), to_float64(logits)) for hidden, logits in pairs]
