"""The two ways in which a stored context is put to the test: leave-one-out, and extension at the end.

Three computations are compared: *full* recomputes the whole sequence, *frozen* extends a stored context at full
precision, *turbo* extends the same context as a preset stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.config import TurboConfig
from esm_turbo.evaluate.contexts import as_outputs, prefill, to_float64
from esm_turbo.evaluate.metrics import LayerErrors, Outputs, TokenErrors
from esm_turbo.proteins.fasta import token_batches
from esm_turbo.tasks.common.arms import FROZEN

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.modeling_esm_turbo import TurboEsmForMaskedLM
    from esm_turbo.proteins.tokens import TokenCodes

# Rows of one leave-one-out forward: with a thousand residues in the past their scores take a few megabytes a head.
_ROWS = 256
# Small, so that proteins of one batch are alike in length and little of it is padding.
_TOKENS_PER_BATCH = 1024
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Protein:
    """One protein to evaluate on.

    Attributes:
        index: among all that are evaluated.
        name: for messages.
        sequence: residues, upper case.
        structural_class: where it is known.
    """

    index: int
    name: str
    sequence: str
    structural_class: str | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def token_ids(self, codes: TokenCodes) -> list[int]:
        """With `<cls>` and `<eos>`."""
        return [codes.cls, *codes.encode(self.sequence, self.name), codes.eos]


@dataclass
class Comparison:
    """Errors of one computation against another, as they come in.

    Attributes:
        names: the two, for messages.
    """

    names: str
    _residues: list[TokenErrors] = field(default_factory=list)
    _specials: list[TokenErrors] = field(default_factory=list)
    _proteins: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _positions: list[npt.NDArray[np.int64]] = field(default_factory=list)
    layers: LayerErrors = field(default_factory=LayerErrors)

    def add(
        self, protein: Protein, position: int, reference: Outputs, other: Outputs, special: npt.NDArray[np.bool_]
    ) -> None:
        """Compares consecutive tokens of a protein.

        Args:
            protein: which.
            position: of the first token; `<cls>` has 0, so residues count from 1.
            reference: n tokens.
            other: n tokens.
            special: which of them are no residues, [n].

        Raises:
            ValueError: an output holds NaN or infinity.
        """
        try:
            errors = TokenErrors.compare(reference, other)
        except ValueError as error:
            raise ValueError(f"{self.names}, {protein.name}: {error}") from None
        self._residues.append(errors[~special])
        self._specials.append(errors[special])
        self._positions.append((position + np.arange(len(special)))[~special])
        self._proteins.append(np.full(int((~special).sum()), protein.index))
        if reference.layers is not None and other.layers is not None:
            self.layers.add(reference.layers[:, ~special], other.layers[:, ~special])

    @property
    def residues(self) -> TokenErrors:
        return TokenErrors.join(self._residues)

    @property
    def special_tokens(self) -> TokenErrors:
        return TokenErrors.join(self._specials)

    @property
    def proteins(self) -> npt.NDArray[np.int64]:
        """The protein of each residue, its index."""
        return np.concatenate(self._proteins)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each residue in its protein, from 1."""
        return np.concatenate(self._positions)

    def __len__(self) -> int:
        return len(self._residues)


@dataclass
class Arms:
    """The three comparisons, for several presets.

    Attributes:
        frozen_full: frozen against full: what freezing costs.
        turbo_frozen: per preset turbo against frozen: what quantisation costs.
        turbo_full: per preset turbo against full: what a user sees.
    """

    frozen_full: Comparison
    turbo_frozen: list[Comparison]
    turbo_full: list[Comparison]

    @classmethod
    def of(cls, names: Sequence[str], protocol: str) -> Arms:
        return cls(
            Comparison(f"{protocol}, frozen against full"),
            [Comparison(f"{protocol}, {name} against frozen") for name in names],
            [Comparison(f"{protocol}, {name} against full") for name in names],
        )

    def add(
        self,
        protein: Protein,
        position: int,
        full: Outputs,
        frozen: Outputs,
        turbo: Iterable[Outputs],
        special: npt.NDArray[np.bool_],
    ) -> None:
        """One protein's tokens under all computations, those of the presets one by one; see `Comparison.add`."""
        self.frozen_full.add(protein, position, full, frozen, special)
        for outputs, to_frozen, to_full in zip(turbo, self.turbo_frozen, self.turbo_full, strict=True):
            to_frozen.add(protein, position, frozen, outputs, special)
            to_full.add(protein, position, full, outputs, special)


@torch.no_grad()
def leave_one_out(
    turbo: ContextModel,
    proteins: Sequence[Protein],
    configs: Sequence[TurboConfig],
    names: Sequence[str],
    advance: Advance,
) -> Arms:
    """Every token in turn is the new one, and sees all others as they are stored.

    Its own keys and values are exact, so that without quantisation every layer computes what the whole forward does:
    frozen and full agree to rounding.

    Args:
        turbo: the model with its calibration.
        proteins: each with `<cls>` and `<eos>`.
        configs: the presets.
        names: what to call them.
        advance: called with 1 after every protein.
    """
    arms = Arms.of(names, "leave-one-out")
    model = turbo.model
    for protein in proteins:
        input_ids = torch.tensor([protein.token_ids(turbo.codes)])
        output, caches = prefill(model, [FROZEN, *configs], input_ids, torch.ones_like(input_ids))
        full = as_outputs(output, 0, slice(None), layers=True)
        del output
        frozen = extend_each_token(model, caches[FROZEN], input_ids[0])
        compressed = (
            frozen if config.codec == FROZEN.codec else extend_each_token(model, caches[config], input_ids[0])
            for config in configs
        )
        arms.add(protein, 0, full, frozen, compressed, np.isin(input_ids[0].numpy(), model.esm.special_ids))
        advance(1)
    return arms


def extend_each_token(model: TurboEsmForMaskedLM, cache: TurboKVCache, input_ids: Tensor) -> Outputs:
    """Extends a cache of one row by each of its own tokens, which is hidden from itself.

    Args:
        model: reads the cache.
        cache: of the whole protein.
        input_ids: the protein's tokens, [n].

    Returns:
        Of every token, with all layers.
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
        parts.append(as_outputs(output, slice(None), 0, layers=True))
    return Outputs.join(parts)


@dataclass
class ExtendArms:
    """The three comparisons at one k and w.

    Attributes:
        new_residues: k, how many residues are extended by.
        refreshed: w, how many of the context run again with them.
        skipped: proteins too short to leave a context.
        arms: the comparisons.
    """

    new_residues: int
    refreshed: int
    skipped: int
    arms: Arms


@torch.no_grad()
def extend_at_end(
    turbo: ContextModel,
    proteins: Sequence[Protein],
    configs: Sequence[TurboConfig],
    names: Sequence[str],
    ks: Sequence[int],
    ws: Sequence[int],
    advance: Advance,
) -> list[ExtendArms]:
    """All but the last k residues are stored; the last k and `<eos>` extend them, w residues refreshed.

    Args:
        turbo: the model with its calibration.
        proteins: those of up to k residues are skipped.
        configs: the presets.
        names: what to call them.
        ks: numbers of new residues.
        ws: numbers of refreshed residues.
        advance: called with the number of proteins done.
    """
    results = {
        (k, w): ExtendArms(k, w, sum(len(p) <= k for p in proteins), Arms.of(names, f"extension by {k}, refresh {w}"))
        for k in ks
        for w in ws
    }
    for batch in token_batches([len(protein) + 2 for protein in proteins], _TOKENS_PER_BATCH):
        group = [proteins[index] for index in batch]
        full, _ = prefill(turbo.model, [], *turbo.codes.batch([p.token_ids(turbo.codes) for p in group]))
        for k in ks:
            special = np.arange(k + 1) == k
            rows = [row for row, protein in enumerate(group) if len(protein) > k]
            if rows:
                expected = [as_outputs(full, row, slice(len(group[row]) + 1 - k, len(group[row]) + 2)) for row in rows]
                long_enough = [group[row] for row in rows]
                for w, frozen, compressed in _extensions(turbo, long_enough, configs, k, ws):
                    for row, protein in enumerate(long_enough):
                        results[k, w].arms.add(
                            protein, len(protein) + 1 - k, expected[row], frozen[row], compressed[row], special
                        )
        advance(len(batch))
    return list(results.values())


def _extensions(
    turbo: ContextModel, proteins: Sequence[Protein], configs: Sequence[TurboConfig], k: int, ws: Sequence[int]
) -> Iterator[tuple[int, list[Outputs], list[tuple[Outputs, ...]]]]:
    """For every w: w, the frozen outputs of each protein, and per protein those of each preset."""
    contexts = [protein.token_ids(turbo.codes)[: -k - 1] for protein in proteins]
    _, caches = prefill(turbo.model, [FROZEN, *configs], *turbo.codes.batch(contexts))
    new = [protein.sequence[-k:] for protein in proteins]
    for w in ws:
        frozen = _extend(turbo, caches[FROZEN], new, w)
        compressed = [
            frozen if config.codec == FROZEN.codec else _extend(turbo, caches[config], new, w) for config in configs
        ]
        yield w, frozen, [tuple(preset[row] for preset in compressed) for row in range(len(proteins))]


def _extend(turbo: ContextModel, cache: TurboKVCache, new: Sequence[str], refresh: int) -> list[Outputs]:
    """Per row the outputs of the new residues (as many in each) and `<eos>`."""
    output = turbo.extend(cache, list(new), refresh=refresh)
    return [
        Outputs(to_float64(hidden), to_float64(logits))
        for hidden, logits in zip(output.hidden_states, output.logits, strict=True)
    ]
