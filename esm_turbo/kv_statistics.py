"""What calibration keeps of a model's queries, keys and values: moments, and a bounded sample.

Everything here is offline arithmetic in NumPy float64 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from .config import Geometry

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean and covariance of a stack of vectors.

    Attributes:
        count: number of vectors.
        mean: [..., head_dim].
        covariance: about the mean, normalised by `count`, [..., head_dim, head_dim].
    """

    count: int
    mean: Array
    covariance: Array

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Moments of no vectors; `shape` is that of one stack, [..., head_dim]."""
        return cls(0, np.zeros(shape), np.zeros((*shape, shape[-1])))

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together, whatever the order (Chan, Golub and LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        if count == 0:
            return self
        share = other.count / count
        shift = other.mean - self.mean
        between = share * (1 - share) * shift[..., :, None] * shift[..., None, :]
        return Moments(
            count,
            self.mean + share * shift,
            (1 - share) * self.covariance + share * other.covariance + between,
        )

    @property
    def second_moment(self) -> Array:
        """Uncentred second moment, [..., head_dim, head_dim]."""
        return self.covariance + self.mean[..., :, None] * self.mean[..., None, :]


@dataclass(frozen=True)
class TokenMoments:
    """Moments of one kind of token's keys, queries and values after RoPE, stacks [layers, heads, head_dim].

    Queries carry the model's scale of head_dim ** -0.5, so that scores are plain products.
    """

    keys: Moments
    queries: Moments
    values: Moments

    def merge(self, other: TokenMoments) -> TokenMoments:
        return TokenMoments(
            self.keys.merge(other.keys), self.queries.merge(other.queries), self.values.merge(other.values)
        )


@dataclass(frozen=True)
class TokenSample:
    """A bounded random sample of tokens, for the codebooks.

    Attributes:
        keys: after RoPE, [layers, heads, tokens, head_dim], rounded to bfloat16 (as they are saved).
        values: likewise.
        is_special: whether a token is no residue but `<cls>` or `<eos>`, [tokens].
    """

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    is_special: npt.NDArray[np.bool_]

    def residues(self) -> TokenSample:
        """The sample without special tokens."""
        keep = ~self.is_special
        return TokenSample(self.keys[:, :, keep], self.values[:, :, keep], self.is_special[keep])


@dataclass(frozen=True)
class KVStatistics:
    """What a codec is fitted from.

    Attributes:
        geometry: of the model.
        residues: moments over residues.
        specials: moments over `<cls>` and `<eos>`.
        sample: tokens of both kinds at the rate at which they occur.
        output_gram: W_o,h^T W_o,h, what an error of a head's output costs, [layers, heads, head_dim, head_dim].
    """

    geometry: Geometry
    residues: TokenMoments
    specials: TokenMoments
    sample: TokenSample
    output_gram: Array

    def select(self, protect_special_tokens: bool) -> tuple[TokenMoments, TokenSample]:
        """Moments and sample of the tokens that are quantised: residues only where the others are protected."""
        if protect_special_tokens:
            return self.residues, self.sample.residues()
        return self.residues.merge(self.specials), self.sample
