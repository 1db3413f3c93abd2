"""Variants of many proteins at once: the scores of one protein at a time, with failures set apart."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo import TurboEsm
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.common.options import Arm, MarginalMethod
from esm_turbo.tasks.variants.many import ManyVariantScores, score_many_variants

PROTEINS = ["MKTAYIAKQRQISFVK", "GSW", "M", "MKTAYIAKQRQISFVKSHFSRQLE"]
VARIANTS = [["M1A", "K2R:T3S", "K16W"], ["G1A"], ["M1C"], ["E24D", "S13G", "K2K"]]


def assert_as_one_by_one(turbo: TurboEsm, found: ManyVariantScores, variants: list[list[str]] | None) -> None:
    for index, protein in enumerate(PROTEINS):
        one = found[index]
        own = None if variants is None else variants[index]
        other = turbo.score_variants(protein, own, method=one.method, arm=one.arm, refresh=5)
        assert [x.variant for x in one.scores] == [x.variant for x in other.scores]
        assert (one.refresh, one.preset, one.wild_type) == (other.refresh, other.preset, other.wild_type)
        np.testing.assert_allclose(one.values, other.values, rtol=0, atol=1e-4 if one.preset == "exact" else 2e-3)


@pytest.mark.parametrize(
    ("arm", "method", "tokens"),
    [("turbo", "masked", 4096), ("frozen", "masked", 4096), ("turbo", "wild_type", None), ("full", "masked", None)],
)
def test_scores_are_those_of_one_protein_at_a_time(
    turbo: TurboEsm, arm: Arm, method: MarginalMethod, tokens: int | None
) -> None:
    found = score_many_variants(turbo, PROTEINS, VARIANTS, arm=arm, method=method, refresh=5, toks_per_batch=tokens)
    assert found.failed == {}
    assert_as_one_by_one(turbo, found, VARIANTS)


def test_all_single_substitutions(turbo: TurboEsm) -> None:
    calls: list[tuple[str, int, int]] = []
    found = score_many_variants(turbo, PROTEINS, refresh=5, progress=lambda *call: calls.append(call))
    assert_as_one_by_one(turbo, found, None)
    assert calls[-1] == ("score", 44, 44)
    assert repr(found) == f"ManyVariantScores(4 proteins, {19 * sum(map(len, PROTEINS))} variants, 0 failed)"
    assert sum(1 for _ in found.rows()) == 19 * sum(map(len, PROTEINS))


def test_proteins_that_fail_do_not_stop_the_others(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(model: object, tokens: int, **options: object) -> None:
        if tokens > 20:
            raise NotEnoughMemoryError(f"{tokens} tokens are too many")

    monkeypatch.setattr(forwards, "check_memory", small)
    found = score_many_variants(turbo, [*PROTEINS, "MK1", "MK"], [*VARIANTS, ["M1A"], ["K1A"]])
    assert [one is None for one in found.scores] == [False, False, False, True, True, True]
    assert found.failed[3] == "26 tokens are too many"
    assert "'1'" in found.failed[4] and "K1A" in found.failed[5]
    with pytest.raises(ValueError, match="protein -1 was not scored"):
        found[-1]


@pytest.mark.parametrize(
    ("proteins", "variants", "options", "message"),
    [
        ([], None, {}, "must hold at least one"),
        (["MK"], [["M1A"], ["M1A"]], {}, "one list per protein \\(1\\), got 2"),
        (["MK"], "M1A", {}, "one list per protein \\(1\\), got 'M1A'"),
        (["MK"], None, {"store": "folder"}, "`store` must be a ContextStore, got a str"),
        (["MK"], None, {"refresh": -1}, "`refresh` must be an integer of at least 0"),
        (["MK"], None, {"method": "both"}, "`method` must be one of"),
        (["MK"], None, {"arm": "fast"}, "`arm` must be one of"),
    ],
)
def test_wrong_arguments(
    turbo: TurboEsm, proteins: list[str], variants: list[list[str]] | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score_many_variants(turbo, proteins, variants, **options)  # type: ignore[arg-type]


def test_variants_may_come_from_a_generator(turbo: TurboEsm) -> None:
    found = score_many_variants(turbo, ["MKT", "MK"], (variants for variants in (["M1A", "K2C"], "M1A")))
    assert [[one.variant for one in scores.scores] for scores in found.scores if scores] == [["M1A", "K2C"], ["M1A"]]


def test_what_is_no_protein_or_variant(turbo: TurboEsm) -> None:
    with pytest.raises(TypeError, match="wild type 1: a wild type must be a string, got NoneType"):
        score_many_variants(turbo, [None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="variant 2: a variant must be a string, got int"):
        score_many_variants(turbo, ["MKT"], [["M1A", 2]])  # type: ignore[list-item]
