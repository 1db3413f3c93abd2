"""How well two ways of scoring the same things agree about their order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TOP_K = 10


@dataclass(frozen=True)
class RankAgreement:
    """Agreement of scores with a reference.

    Attributes:
        count: how many things were scored.
        spearman: rank correlation, from -1 to 1; None where there are fewer than two, or all are equal.
        top_k: how many of the best are looked at, `count` at most.
        top_k_overlap: share of the reference's best `top_k` that are among the best `top_k` here.
        mean_difference: mean absolute difference of the scores.
    """

    count: int
    spearman: float | None
    top_k: int
    top_k_overlap: float
    mean_difference: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def rank_agreement(scores: Sequence[float], reference: Sequence[float], top_k: int = TOP_K) -> RankAgreement:
    """Compares two scorings of the same things, the higher the better in both.

    Args:
        scores: finite, one a thing.
        reference: finite, in the same order.
        top_k: how many of the best to compare.

    Raises:
        ValueError: there are none, not as many of both, one is not finite, or `top_k` is not positive.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (scores, reference))
    if ours.shape != theirs.shape or ours.ndim != 1 or not len(ours):
        raise ValueError(f"as many scores as of the reference are needed, got {len(ours)} and {len(theirs)}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise ValueError("scores that are not finite cannot be ranked")
    if top_k < 1:
        raise ValueError(f"`top_k` must be at least 1, got {top_k}")
    top_k = min(top_k, len(ours))
    shared = len(_best(ours, top_k) & _best(theirs, top_k))
    return RankAgreement(len(ours), spearman(ours, theirs), top_k, shared / top_k, float(np.abs(ours - theirs).mean()))


def spearman(scores: Sequence[float] | npt.NDArray[Any], reference: Sequence[float] | npt.NDArray[Any]) -> float | None:
    """Spearman's rank correlation; None where it is not defined: fewer than two, or all equal."""
    # SciPy's statistics take a second to load.
    from scipy.stats import spearmanr

    if len(scores) < 2 or len(set(scores)) < 2 or len(set(reference)) < 2:
        return None
    found = float(spearmanr(scores, reference).statistic)
    return None if math.isnan(found) else found


def _best(scores: npt.NDArray[np.float64], k: int) -> set[int]:
    """Indices of the k highest; of equal ones the first."""
    return set(np.argsort(-scores, kind="stable")[:k].tolist())
