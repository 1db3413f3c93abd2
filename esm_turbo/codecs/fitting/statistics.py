"""Statistics of a model's queries, keys and values: moments, and a bounded sample of tokens.

All arithmetic here is offline, in NumPy float64 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from esm_turbo.config import Geometry

Array = npt.NDArray[np.float64]

KEY_BLOCK = 64
"""Positions per block: keys are taken relative to the first position of their block."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and covariance of weighted vectors, in a stack.

    Attributes:
        count: number of vectors, or the sum of their weights: one number, or one per element of the stack [...].
        mean: weighted mean, [..., head_dim].
        covariance: about the mean, normalised by `count`, [..., head_dim, head_dim].
    """

    count: int | Array
    mean: Array
    covariance: Array

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Moments of zero vectors; `shape` is that of the mean, [..., head_dim]."""
        return cls(0, np.zeros(shape), np.zeros((*shape, shape[-1])))

    def merge(self, other: Moments) -> Moments:
        """Moments of the union, independent of the order (Chan, Golub and LeVeque 1979, eq. 2.1).

        Also of tensors in place of arrays, where a device has float64.
        """
        count = self.count + other.count
        if isinstance(count, int):
            if not (self.count and other.count):
                return other if other.count else self
            share = part = other.count / count
        else:
            share = (other.count / (count + (count == 0)))[..., None]
            part = share[..., None]
        shift = other.mean - self.mean
        between = part * (1 - part) * shift[..., :, None] * shift[..., None, :]
        return Moments(
            count,
            self.mean + share * shift,
            (1 - part) * self.covariance + part * other.covariance + between,
        )

    @property
    def second_moment(self) -> Array:
        """Uncentred second moment, [..., head_dim, head_dim]."""
        return self.covariance + self.mean[..., :, None] * self.mean[..., None, :]


@dataclass(frozen=True)
class TokenMoments:
    """Moments of the keys after RoPE and of the values of one kind of token, [layers, heads, head_dim]."""

    keys: Moments
    values: Moments

    def merge(self, other: TokenMoments) -> TokenMoments:
        return TokenMoments(self.keys.merge(other.keys), self.values.merge(other.values))


@dataclass(frozen=True)
class Sensitivity:
    """Sensitivity of the attention output to errors of cached keys and values, and moments weighted by it.

    With p_ij the attention of query i to key j, o_i the output and W the head's columns of the output projection, an
    error e of a score changes the output by p_ij (v_j - o_i) e to first order, and an error of a value changes it by
    p_ij times that error. The weights are G_ij = p_ij^2 |W (v_j - o_i)|^2 and p_ij^2, i != j, over residues. Keys and
    queries are relative to blocks (`KEY_BLOCK`), see `codecs.base`.

    Attributes:
        count: number of residues.
        key_mean: unweighted mean of the keys, [layers, heads, head_dim].
        keys: moments of the keys, each weighted by the square root of sum_i G_ij.
        values: moments of the values, each weighted by the square root of sum_i p_ij^2.
        queries: mean over keys j of sum_i G_ij q_i q_i^T, [layers, heads, head_dim, head_dim].
        attention: mean over values j of sum_i p_ij^2, [layers, heads].
    """

    count: int
    key_mean: Array
    keys: Moments
    values: Moments
    queries: Array
    attention: Array

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Sensitivity over zero residues; `shape` is [..., head_dim]."""
        nothing = Moments(np.zeros(shape[:-1]), np.zeros(shape), np.zeros((*shape, shape[-1])))
        return cls(0, np.zeros(shape), nothing, nothing, np.zeros((*shape, shape[-1])), np.zeros(shape[:-1]))

    def merge(self, other: Sensitivity) -> Sensitivity:
        """Sensitivity over the union, independent of the order; also of tensors, see `Moments.merge`."""
        if not (self.count and other.count):
            return other if other.count else self
        count = self.count + other.count
        share = other.count / count

        def mean(a: Array, b: Array) -> Array:
            return (1 - share) * a + share * b

        return Sensitivity(
            count,
            mean(self.key_mean, other.key_mean),
            self.keys.merge(other.keys),
            self.values.merge(other.values),
            mean(self.queries, other.queries),
            mean(self.attention, other.attention),
        )


@dataclass(frozen=True)
class TokenSample:
    """A bounded random sample of tokens, from which codebooks are fitted; its first tokens are a smaller sample.

    Attributes:
        keys: keys after RoPE, rounded to bfloat16 as in files, [layers, heads, tokens, head_dim].
        values: values, rounded alike, [layers, heads, tokens, head_dim].
        is_special: whether a token is `<cls>` or `<eos>` rather than a residue, [tokens].
        positions: position of each token, [tokens].
        key_weights: weight of each key's errors, see `Sensitivity.keys`, [layers, heads, tokens].
        value_weights: weight of each value's errors, see `Sensitivity.values`, [layers, heads, tokens].
    """

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    is_special: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    key_weights: npt.NDArray[np.float32]
    value_weights: npt.NDArray[np.float32]

    def at(self, tokens: slice | npt.NDArray[np.bool_]) -> TokenSample:
        """Some of the tokens."""
        return TokenSample(
            self.keys[:, :, tokens],
            self.values[:, :, tokens],
            self.is_special[tokens],
            self.positions[tokens],
            self.key_weights[:, :, tokens],
            self.value_weights[:, :, tokens],
        )

    def residues(self) -> TokenSample:
        """The sample without special tokens."""
        return self.at(~self.is_special)


@dataclass(frozen=True)
class KVStatistics:
    """Statistics of one model, from which codecs are fitted.

    Attributes:
        geometry: geometry of the model.
        residues: moments over residues.
        specials: moments over `<cls>` and `<eos>`.
        sensitivity: moments weighted by the effect of errors on the output.
        sample: tokens of both kinds, in the proportion in which they occur.
        inv_freq: the model's rotary frequencies, [head_dim / 2].
        output_gram: W_o,h^T W_o,h, the cost of an error of a head's output, [layers, heads, head_dim, head_dim].
        device: where samples are quantised in a fit; one that has float64.
    """

    geometry: Geometry
    residues: TokenMoments
    specials: TokenMoments
    sensitivity: Sensitivity
    sample: TokenSample
    inv_freq: Array
    output_gram: Array
    device: str = "cpu"

    def select(self, protect_special_tokens: bool) -> tuple[TokenMoments, TokenSample]:
        """Moments and sample of the tokens that are quantised: only residues if special tokens are protected.

        Raises:
            ValueError: the sample holds no such token.
        """
        moments, sample = self.residues.merge(self.specials), self.sample
        if protect_special_tokens:
            moments, sample = self.residues, self.sample.residues()
        if not len(sample.is_special):
            raise ValueError("the calibration's sample holds no residues: calibrate with a larger `sample_size`")
        return moments, sample
