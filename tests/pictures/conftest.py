"""Results to draw, made without a model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.generation.records import GeneratedSequence
from esm_turbo.tasks.scoring.records import Candidate, TargetResult
from esm_turbo.tasks.scoring.score import CandidateScore, Scores
from esm_turbo.tasks.variants.records import MeasuredVariant, ProteinVariants
from esm_turbo.tasks.variants.score import VariantScore, VariantScores
from esm_turbo.tasks.variants.substitutions import all_substitutions

ODD = 'a/b|$x^2$<b>&"q"</script>'
"""An identifier with what HTML, formulas of matplotlib and paths would take for their own."""

WILD_TYPE = "MKTAYIAK"


def scored(variants: Iterable[str | MeasuredVariant], *arms: str, wild_type: str = WILD_TYPE) -> ProteinVariants:
    """Variants of a protein whose first position is 24, with random scores by each arm."""
    measured = tuple(MeasuredVariant(one) if isinstance(one, str) else one for one in variants)
    scores = {}
    for seed, arm in enumerate(arms or ("turbo",)):
        values = np.random.default_rng(seed).normal(-2, 2, len(measured)).tolist()
        ones = tuple(VariantScore(one.variant, value) for one, value in zip(measured, values, strict=True))
        preset = None if arm == "full" else "turbo3"
        scores[arm] = VariantScores(ones, WILD_TYPE, "masked", arm, preset, 7, "tiny", 24)  # type: ignore[arg-type]
    return ProteinVariants(ProteinRecord(ODD, wild_type), 24, measured, scores)  # type: ignore[arg-type]


@pytest.fixture
def variants() -> ProteinVariants:
    """All substitutions, two of several residues, measurements of some, and two arms."""
    names = [*all_substitutions(WILD_TYPE, 24), "M24A:K25R", "M24C:K25R"]
    measured = [MeasuredVariant(name, index / 10 if index % 3 else None) for index, name in enumerate(names)]
    return scored(measured, "turbo", "full")


@pytest.fixture
def ranking() -> TargetResult:
    """25 candidates of several lengths in two arms."""
    generator = np.random.default_rng(0)
    sequences = ["ACDEFGHIKL"[: 3 + index % 8] for index in range(25)]
    scores = {}
    for arm, preset in (("full", None), ("turbo", "turbo3")):
        ones = [CandidateScore(s, tuple((-3 + generator.normal(0, 0.5, len(s))).tolist())) for s in sequences]
        scores[arm] = Scores(tuple(ones), arm, preset, None, 0, "tiny")  # type: ignore[arg-type]
    candidates = tuple(Candidate(f"{ODD}{index}", sequence) for index, sequence in enumerate(sequences))
    agreement = {"turbo": scores["turbo"].agreement(scores["full"])}
    return TargetResult(ProteinRecord(ODD, "MKTAY"), candidates, scores, agreement)  # type: ignore[arg-type]


@pytest.fixture
def designs() -> list[GeneratedSequence]:
    """Four designs of `ACDEFGHI` at positions 2, 3 and 7."""
    sequences = ["AAAEFGWI", "AACEFGWI", "AAGEFGWI", "AAAEFGHI"]
    log_probs = [-1.0, -2.0, -3.0]
    return [GeneratedSequence(ODD, n, s, [2, 3, 7], log_probs, 2**62 + n) for n, s in enumerate(sequences, start=1)]
