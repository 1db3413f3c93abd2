"""Rankings, and the agreement of two of the same items."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esm_turbo.tasks.common.options import DEFAULT_TOP_K


@dataclass(frozen=True)
class RankAgreement:
    """Agreement of scores with a reference.

    Attributes:
        count: number of items.
        spearman: rank correlation, from -1 to 1; None for fewer than two items, or if all scores are equal.
        top_k: number of top items compared, `count` at most.
        top_k_overlap: fraction of the reference's top `top_k` items that are also among the top `top_k` here.
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


def rank_agreement(scores: Sequence[float], reference: Sequence[float], top_k: int = DEFAULT_TOP_K) -> RankAgreement:
    """Compare two sets of scores of the same items; higher is better in both.

    Args:
        scores: finite scores, one per item.
        reference: finite scores of the same items in the same order.
        top_k: number of top items to compare.

    Raises:
        ValueError: there are no scores, their numbers differ, one is not finite, or `top_k` is not positive.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (scores, reference))
    if ours.shape != theirs.shape or ours.ndim != 1 or not len(ours):
        raise ValueError(f"the two rankings need the same items, at least one; got {len(ours)} and {len(theirs)}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise ValueError("scores that are not finite cannot be ranked")
    if top_k < 1:
        raise ValueError(f"`top_k` must be at least 1, got {top_k}")
    top_k = min(top_k, len(ours))
    shared = len(_best(ours, top_k) & _best(theirs, top_k))
    return RankAgreement(len(ours), spearman(ours, theirs), top_k, shared / top_k, float(np.abs(ours - theirs).mean()))


def spearman(scores: Sequence[float] | npt.NDArray[Any], reference: Sequence[float] | npt.NDArray[Any]) -> float | None:
    """Spearman's rank correlation; None where it is undefined: fewer than two scores, or all equal."""
    # Importing SciPy's statistics takes a second.
    from scipy.stats import spearmanr

    if len(scores) < 2 or len(set(scores)) < 2 or len(set(reference)) < 2:
        return None
    correlation = float(spearmanr(scores, reference).statistic)
    return None if math.isnan(correlation) else correlation


def _best(scores: npt.NDArray[np.float64], k: int) -> set[int]:
    """Indices of the k highest scores; of equal scores, the first."""
    return set(np.argsort(-scores, kind="stable")[:k].tolist())


def lowest_first(values: Sequence[float | None]) -> list[int]:
    """Indices of values, the lowest first; equal ones keep their order, and those that are missing or NaN come last."""
    known = [math.inf if x is None or math.isnan(x) else x for x in values]
    return sorted(range(len(values)), key=known.__getitem__)
