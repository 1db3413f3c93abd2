"""Errors of one model output against another, per token, and their summary statistics.

Everything is computed in NumPy float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

Array = npt.NDArray[np.float64]
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class Accuracy:
    """Summary statistics of one comparison (docs/concepts.md).

    Attributes:
        tokens: number of tokens compared.
        cosine_mean: mean cosine of the final hidden states.
        cosine_q01: its 1 % quantile.
        cosine_min: its minimum.
        kl_mean: mean Kullback-Leibler divergence of the predicted distributions, KL(reference || other), nats.
        kl_q99: its 99 % quantile.
        top1_agreement: share of tokens whose most likely prediction agrees.
        relative_rms_error: of the hidden states, sqrt(sum |other - reference|^2 / sum |reference|^2); unlike the
            cosine, it is sensitive to errors of scale.
    """

    tokens: int
    cosine_mean: float
    cosine_q01: float
    cosine_min: float
    kl_mean: float
    kl_q99: float
    top1_agreement: float
    relative_rms_error: float


@dataclass(frozen=True)
class Outputs:
    """Model outputs of n tokens.

    Attributes:
        hidden: hidden states after the last layer norm, [n, hidden_size].
        logits: [n, vocab_size].
        layers: hidden states of every layer, float32 [num_layers, n, hidden_size]; None if not needed.
    """

    hidden: Array
    logits: Array
    layers: npt.NDArray[np.float32] | None = None

    @classmethod
    def join(cls, parts: Sequence[Outputs]) -> Self:
        """Concatenate outputs along the tokens."""
        layers = None
        if parts[0].layers is not None:
            layers = np.concatenate([part.layers for part in parts if part.layers is not None], axis=1)
        return cls(np.concatenate([part.hidden for part in parts]), np.concatenate([p.logits for p in parts]), layers)


@dataclass(frozen=True)
class TokenErrors:
    """Errors per token, arrays [n], from which quantiles and groups are computed.

    Attributes:
        cosine: of the hidden states.
        kl: KL(reference || other) of the predictions, nats.
        agrees: 1 where the most likely prediction agrees, else 0.
        squared_error: |other - reference|^2 of the hidden states.
        squared_norm: |reference|^2.
    """

    cosine: Array
    kl: Array
    agrees: Array
    squared_error: Array
    squared_norm: Array

    @classmethod
    def compare(cls, reference: Outputs, other: Outputs) -> Self:
        """Errors of `other` against `reference`.

        Raises:
            ValueError: an output contains NaN or infinity.
        """
        for name, outputs in (("the reference", reference), ("the output", other)):
            if not (np.isfinite(outputs.hidden).all() and np.isfinite(outputs.logits).all()):
                raise ValueError(f"{name} holds NaN or infinity")
        cosine, squared_error, squared_norm = _vector_errors(reference.hidden, other.hidden)
        expected, given = log_softmax(reference.logits, axis=-1), log_softmax(other.logits, axis=-1)
        # Rounding can make the divergence of equal distributions negative.
        kl = np.maximum(0.0, (np.exp(expected) * (expected - given)).sum(-1))
        agrees = reference.logits.argmax(-1) == other.logits.argmax(-1)
        return cls(cosine, kl, agrees.astype(np.float64), squared_error, squared_norm)

    @classmethod
    def join(cls, parts: Iterable[TokenErrors]) -> Self:
        """Concatenate errors along the tokens."""
        rows = list(parts)
        return cls(*(np.concatenate([getattr(row, f.name) for row in rows]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.cosine)

    def __getitem__(self, tokens: Any) -> TokenErrors:
        return TokenErrors(*(getattr(self, f.name)[tokens] for f in fields(self)))

    def accuracy(self) -> Accuracy:
        """Summary statistics of these tokens.

        Raises:
            ValueError: there are no tokens.
        """
        if not len(self):
            raise ValueError("there are no tokens to compare")
        return Accuracy(
            tokens=len(self),
            cosine_mean=float(self.cosine.mean()),
            cosine_q01=float(np.quantile(self.cosine, 0.01)),
            cosine_min=float(self.cosine.min()),
            kl_mean=float(self.kl.mean()),
            kl_q99=float(np.quantile(self.kl, 0.99)),
            top1_agreement=float(self.agrees.mean()),
            relative_rms_error=_relative_rms(self.squared_error.sum(), self.squared_norm.sum()),
        )


class LayerErrors:
    """Running sums of the errors of the hidden states, per layer."""

    def __init__(self) -> None:
        self.tokens = 0
        # Per layer, the sums of cosine, squared error and squared norm.
        self._sums: Array | float = 0.0

    def add(self, reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> None:
        """Add hidden states [num_layers, n, hidden_size]."""
        pairs = zip(reference, other, strict=True)
        sums = [[x.sum() for x in _vector_errors(a.astype(np.float64), b.astype(np.float64))] for a, b in pairs]
        self._sums = self._sums + np.array(sums)
        self.tokens += reference.shape[1]

    def figures(self) -> list[tuple[float, float]]:
        """Per layer, the mean cosine and the relative RMS error; empty if nothing was added."""
        rows = np.reshape(self._sums, (-1, 3)) if self.tokens else np.zeros((0, 3))
        return [(float(cosine) / self.tokens, _relative_rms(error, norm)) for cosine, error, norm in rows]


def _vector_errors(reference: Array, other: Array) -> tuple[Array, Array, Array]:
    """Cosine, squared error and squared norm of the reference, over the last axis."""
    squared_norm = (reference**2).sum(-1)
    norms = np.sqrt(squared_norm * (other**2).sum(-1))
    cosine = (reference * other).sum(-1) / np.maximum(norms, _TINY)
    return np.minimum(cosine, 1.0), ((other - reference) ** 2).sum(-1), squared_norm


def _relative_rms(squared_error: float, squared_norm: float) -> float:
    return float(np.sqrt(squared_error / max(squared_norm, _TINY)))
