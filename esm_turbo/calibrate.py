"""Calibration as an estimator: moments and a bounded sample of a model's queries, keys and values, in one pass.

Memory does not grow with the number of proteins, and the result depends neither on their order nor on the batches:
moments are merged exactly, and a hash of the sequence decides which tokens enter the sample.

Keys after RoPE depend on their position, and most calibration proteins are short. Attention depends only on relative
positions, so that every protein is run at its own offset, also taken from its hash. This changes nothing but the
rotation of its queries and keys, and the statistics hold at every position up to `max_positions`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.calibration import Calibration
from esm_turbo.codecs.fitting.statistics import Array, KVStatistics, Moments, Sensitivity, TokenMoments
from esm_turbo.codecs.fitting.stored import from_tensors, to_tensors
from esm_turbo.config import PRODUCT_PRESETS, Geometry, TurboConfig
from esm_turbo.files.artifacts import package_versions
from esm_turbo.files.families import FAMILIES, FAMILY_NAMES, encoder_of, projections_of
from esm_turbo.files.fingerprint import attention_fingerprint, model_fingerprint
from esm_turbo.files.hub import model_name
from esm_turbo.files.identity import exact_identity, model_identity
from esm_turbo.model.checkpoints import check_weights
from esm_turbo.model.collectors import (
    MomentsCollector,
    ProteinAttention,
    Proteins,
    on_host,
)
from esm_turbo.model.inputs import has_gaps
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.model.sample_buffer import SampleBuffer
from esm_turbo.model.sensitivity import SampleCollector, SensitivityCollector
from esm_turbo.model.sequences import number_sequences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from esm_turbo.model.cached_model import CachedModel


_STATISTICS = ("residues", "specials", "sensitivity")


@dataclass(frozen=True)
class PartialStatistics:
    """Statistics that a calibrator has gathered from some proteins; can be pickled, see `KVCalibrator.merge`.

    Attributes:
        residues: moments over residues.
        specials: moments over special tokens.
        sensitivity: see `Sensitivity`.
        sample: the tokens of lowest priority number.
        sequences: number of proteins.
    """

    residues: TokenMoments
    specials: TokenMoments
    sensitivity: Sensitivity
    sample: SampleBuffer
    sequences: int

    def __getstate__(self) -> dict[str, Any]:
        """Statistics that lie on a device travel as arrays."""
        return {name: on_host(x) if name in _STATISTICS else x for name, x in vars(self).items()}


class KVCalibrator:
    """Estimator of the statistics from which the codecs of one model are fitted.

    Args:
        model: an encoder of a supported family, such as an `EsmModel`, or a model with a language-model head, such as
            an `EsmForMaskedLM`; it is not changed.
        sample_size: number of tokens kept for the codebooks.
        max_positions: the statistics hold for positions below this.

    Attributes:
        n_sequences_seen_: proteins seen so far.
        n_residues_seen_: residues seen so far; where contexts are exact, the stored tokens, those around residues too.

    Raises:
        ValueError: the model's weights are not finite, or it is of no supported family.
    """

    n_sequences_seen_: int
    n_residues_seen_: int
    _residues: TokenMoments
    _specials: TokenMoments
    _sensitivity: Sensitivity
    _sample: SampleBuffer

    def __init__(self, model: PreTrainedModel, *, sample_size: int = 1024, max_positions: int = 1024) -> None:
        if sample_size < 1 or max_positions < 1:
            raise ValueError(f"`sample_size` and `max_positions` must be positive, got {sample_size}, {max_positions}")
        encoder = encoder_of(model)
        if getattr(getattr(encoder, "config", None), "model_type", None) not in FAMILIES:
            raise ValueError(f"`model` must be of {FAMILY_NAMES}, such as an EsmModel, got {type(model).__name__}")
        self.model = model
        self.sample_size = sample_size
        self.max_positions = max_positions
        check_weights(model)
        family = FAMILIES[encoder.config.model_type]
        self._encoder: CachedModel = family.load(family.model).from_esm(encoder).eval()
        # It shares nothing but weights with the model.
        self._weights = model_identity(self._encoder).weights
        config = self._encoder.config
        self.geometry = Geometry.of(config)
        self._protected_ids = torch.tensor(self._encoder.protected_ids, dtype=torch.int64)
        self._output_gram = _output_gram(self._encoder, self.geometry)
        self._inv_freq = self._encoder.rotary_frequencies.detach().float().cpu()
        self._forget()

    @cached_property
    def _output_root(self) -> Tensor:
        """R of every head with R R^T its Gram matrix, on the model's device."""
        eigenvalues, vectors = np.linalg.eigh(self._output_gram)
        root = vectors * np.sqrt(np.maximum(eigenvalues, 0))[..., None, :]
        return torch.from_numpy(root.astype(np.float32)).to(self._encoder.device)

    def partial_fit(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> KVCalibrator:
        """Add a batch of proteins.

        Of a family with exact contexts, such as E1, a row is homologs, one whole sequence after the other. What a cache
        stores of them is observed, as the sequences after them read it; the last of a row is only a query.

        Args:
            input_ids: token ids with `<cls>` and `<eos>`, integers [batch, n].
            attention_mask: [batch, n], padded on the right; None for all ones.
            position_ids: [batch, n], where residues are left out; None for 0, 1, 2, ...

        Raises:
            ValueError: invalid shapes or ids, a mask that is padded on the left or has holes, a row of only `<mask>`
                and padding, or queries, keys or values that are not finite, or the model has changed since the first
                protein. The calibrator is unchanged then.
        """
        self._check_unchanged(model_identity(self._encoder).weights)
        ids, mask = self._checked(input_ids, attention_mask)
        rows = [row[keep] for row, keep in zip(ids, mask, strict=True)]
        places = torch.arange(ids.shape[1]).expand_as(ids) if position_ids is None else position_ids.cpu()
        spans = (places.where(mask, 0).amax(1) + 1).tolist()
        starts = [_hash_tokens(row) % max(1, self.max_positions - n + 1) for row, n in zip(rows, spans, strict=True)]
        positions = (places + torch.tensor(starts)[:, None])[mask]
        special = torch.isin(torch.cat(rows), self._protected_ids)
        numbers = chains = homologs = None
        if self._encoder.exact_contexts is not None:
            numbers = number_sequences(ids, self._encoder.special_ids[0])
            families = [_sequences(row, of[keep]) for row, of, keep in zip(rows, numbers, mask, strict=True)]
            rows, homologs = (
                [x for family in families for x in family],
                [i for one in families for i in range(len(one))],
            )
            chains = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
        seeds, lengths = [_hash_tokens(row) for row in rows], [len(row) for row in rows]
        proteins = Proteins.of(lengths, positions, special, seeds, homologs)
        sampled, priorities = self._choose(lengths, seeds, proteins.stored)
        device = self._encoder.device
        moments = MomentsCollector(proteins, device)
        sensitivity = SensitivityCollector(proteins, self._output_root, self._inv_freq.to(device))
        sample = SampleCollector(sampled.to(device), sensitivity)
        session = ProteinAttention(proteins, [moments, sensitivity, sample], device)
        with torch.no_grad():
            ids, mask = ids.to(device), mask.to(device)
            embeddings = self._encoder.embed(ids, mask, None)
            embeddings = self._encoder.embed_sequences(embeddings, None if numbers is None else numbers.to(device))
            # All proteins in one row: padding would cost as much as tokens.
            packed = ForwardInputs(
                ids[mask][None],
                position_ids=positions[None].to(device),
                inputs_embeds=embeddings[mask][None],
                chains=None if chains is None else chains[None].to(device),
            )
            self._encoder.executor.observe(packed, session)
        (residues, specials), sensitivities = moments.result(), sensitivity.result()
        self._merge(residues, specials, sensitivities)
        self._sample.add(priorities, **sample.result(), is_special=special[sampled], positions=positions[sampled])
        self.n_sequences_seen_ += len(ids)
        self.n_residues_seen_ += int((proteins.stored & ~special).sum())
        return self

    def take(self) -> PartialStatistics:
        """Return the statistics gathered so far and reset the calibrator."""
        taken = PartialStatistics(
            self._residues, self._specials, self._sensitivity, self._sample, self.n_sequences_seen_
        )
        self._forget()
        return taken

    def merge(self, other: PartialStatistics) -> KVCalibrator:
        """Add what another calibrator of the same model gathered from other proteins.

        Sums in floating point depend on their order by rounding: merged in the same order, the same parts give the same
        bits wherever they were gathered.

        Raises:
            ValueError: the other one has a sample of another size.
        """
        if other.sample.size != self.sample_size:
            raise ValueError(f"`sample_size` is {self.sample_size} here, and {other.sample.size} of what is merged")
        self._merge(other.residues, other.specials, other.sensitivity)
        self._sample.add(other.sample.priorities, **other.sample.tokens)
        self.n_sequences_seen_ += other.sequences
        self.n_residues_seen_ += int(other.residues.keys.count)
        return self

    def _merge(self, residues: TokenMoments, specials: TokenMoments, sensitivity: Sensitivity) -> None:
        if self.n_sequences_seen_ and isinstance(self._residues.keys.mean, Tensor) != isinstance(
            residues.keys.mean, Tensor
        ):
            # What another process gathered, beside what lies on this one's device.
            self._residues, self._specials, self._sensitivity = map(
                on_host, (self._residues, self._specials, self._sensitivity)
            )
            residues, specials, sensitivity = map(on_host, (residues, specials, sensitivity))
        self._residues = self._residues.merge(residues)
        self._specials = self._specials.merge(specials)
        self._sensitivity = self._sensitivity.merge(sensitivity)

    def _forget(self) -> None:
        shape = (self.geometry.num_layers, self.geometry.num_heads, self.geometry.head_dim)
        self._residues = TokenMoments(*(Moments.empty(*shape) for _ in range(2)))
        self._specials = TokenMoments(*(Moments.empty(*shape) for _ in range(2)))
        self._sensitivity = Sensitivity.empty(*shape)
        self._sample = SampleBuffer(self.sample_size)
        self.n_sequences_seen_ = 0
        self.n_residues_seen_ = 0

    def finalize(
        self,
        presets: Iterable[str | TurboConfig] = PRODUCT_PRESETS,
        provenance: dict[str, Any] | None = None,
    ) -> Calibration:
        """Fit the codecs.

        Args:
            presets: presets to fit now; the calibration fits others on first use.
            provenance: additional provenance to record, JSON values.

        Raises:
            ValueError: fewer residues were seen than a head has components, or the model has changed since the first
                protein.
        """
        self._check_unchanged(exact_identity(self._encoder).weights)
        if self.n_residues_seen_ < self.geometry.head_dim:
            exact = self._encoder.exact_contexts is not None
            raise ValueError(
                f"calibration has seen {self.n_residues_seen_} residues{' that sequences after them read' * exact},"
                f" fewer than a head has components ({self.geometry.head_dim}); give it more"
                f" {'families of homologs' if exact else 'proteins'}"
            )
        statistics = KVStatistics(
            self.geometry,
            on_host(self._residues),
            on_host(self._specials),
            on_host(self._sensitivity),
            self._sample.sample(),
            self._inv_freq.numpy().astype(np.float64),
            self._output_gram,
        )
        # Rounded as in files, so that a calibration and its saved copy give the same codecs.
        statistics = from_tensors(*to_tensors(statistics), self.geometry)
        record = {
            "model": model_name(self.model.config._name_or_path),
            "sequences": self.n_sequences_seen_,
            "residues": self.n_residues_seen_,
            "sample_size": self.sample_size,
            "max_positions": self.max_positions,
            "versions": package_versions(),
        }
        weights = model_fingerprint(self._encoder)
        attention = attention_fingerprint(weights, self.geometry.num_layers)
        calibration = Calibration(statistics, attention, record | (provenance or {}), weights=weights)
        return calibration.fit(presets, device=self._encoder.device)

    def _check_unchanged(self, weights: str) -> None:
        if weights == self._weights:
            return
        if self.n_sequences_seen_:
            raise ValueError(
                "the model has changed since the calibrator saw its first protein, and statistics are of one model:"
                " make another calibrator"
            )
        self._weights, self._output_gram = weights, _output_gram(self._encoder, self.geometry)
        vars(self).pop("_output_root", None)

    def _checked(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Checked ids and bool mask, [batch, n] each, on the CPU."""
        ids = input_ids.cpu()
        mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise ValueError(f"`input_ids` must be integers [batch, n], got {ids.dtype} of shape {list(ids.shape)}")
        if mask.shape != ids.shape:
            raise ValueError(
                f"`attention_mask` must be of the shape of `input_ids` {list(ids.shape)}, got {list(mask.shape)}"
            )
        config = self._encoder.config
        if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
            raise ValueError(f"`input_ids` must lie in 0 to {config.vocab_size - 1}")
        if bool(has_gaps(mask).any()):
            raise ValueError("`attention_mask` is padded on the left or has holes; pad on the right")
        nothing = ~(mask & (ids != config.mask_token_id)).any(1)
        if bool(nothing.any()):
            raise ValueError(f"row {int(nothing.nonzero()[0])} of `input_ids` holds nothing but <mask> and padding")
        return ids, mask

    def _choose(
        self, lengths: Sequence[int], seeds: Sequence[int], stored: Tensor
    ) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Indices of the stored tokens of a batch that enter the sample so far, and their priorities."""
        draws = [
            np.random.Generator(np.random.PCG64(seed)).integers(0, 2**63, n)
            for n, seed in zip(lengths, seeds, strict=True)
        ]
        priorities = np.where(stored.numpy(), np.concatenate(draws), np.iinfo(np.int64).max)
        best = self._sample.candidates(priorities)
        return torch.from_numpy(best), priorities[best]


def _sequences(row: Tensor, numbers: Tensor) -> list[Tensor]:
    """The sequences of a row of ids, whose tokens are numbered by the sequence that they are in."""
    return list(row.split(numbers.bincount().tolist()))


def _hash_tokens(ids: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=8).digest(), "little")


def _output_gram(model: CachedModel, geometry: Geometry) -> Array:
    """W_o,h^T W_o,h of every head, float64 rounded to float32 as in files, [layers, heads, head_dim, head_dim]."""
    grams = []
    for *_, output in projections_of(model):
        weight = output.weight.detach().float()
        # In float64, which not every device has.
        heads = (weight if weight.is_cuda else weight.cpu()).double().unflatten(1, (geometry.num_heads, -1))
        grams.append(torch.einsum("ohi,ohj->hij", heads, heads).float().cpu())
    return torch.stack(grams).double().numpy()
