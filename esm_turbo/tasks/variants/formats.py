"""Tables of variants in the columns of other programs.

ProteinGym (Notin et al. 2023) has one row per variant: `mutant` as in `A1P:D2N`, `mutated_sequence`, and scores.
dms-viz (Hannon et al. 2024) has one row per substitution: `site`, `wildtype`, `mutant`, and a metric; several arms are
its conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from esm_turbo.tasks.common.options import VariantColumns
from esm_turbo.tasks.variants.substitutions import has_indel, mutated, parse_variant, short_form, split_variant

if TYPE_CHECKING:
    from esm_turbo.tasks.variants.records import ProteinVariants

SCORE, CONDITION = "score", "condition"

Rows = Iterator[tuple[object, ...]]


def formatted(results: Sequence[ProteinVariants], columns: VariantColumns) -> tuple[list[str], Rows]:
    """Names of the columns, and the rows.

    Both formats are of one protein; of several, a first column `protein` tells them apart.

    Args:
        results: at least one, all with the same arms.
        columns: `proteingym` or `dms-viz`.

    Raises:
        ValueError: see `check_columns`.
    """
    check_columns(columns, (variant.variant for result in results for variant in result.variants))
    arms = list(results[0].scores)
    names, rows = (_proteingym if columns == "proteingym" else _dms_viz)(results, arms)
    if len(results) == 1:
        return names, (row[1:] for row in rows)
    return ["protein", *names], rows


def check_columns(columns: VariantColumns, variants: Iterable[str]) -> None:
    """Check that a format has a row for at least one of some variants.

    Raises:
        ValueError: it is dms-viz, and all of them have several substitutions.
    """
    if columns == "dms-viz" and all(len(split_variant(one)) > 1 or has_indel(one) for one in variants):
        raise ValueError("dms-viz shows single substitutions, and no variant is one; use --columns proteingym")


def _proteingym(results: Sequence[ProteinVariants], arms: Sequence[str]) -> tuple[list[str], Rows]:
    measured = any(one.measured is not None for result in results for one in result.variants)
    scores = [SCORE] if len(arms) == 1 else [f"{SCORE}_{arm}" for arm in arms]

    def rows() -> Rows:
        for result in results:
            values = zip(*(one.values for one in result.scores.values()), strict=True)
            for variant, own in zip(result.variants, values, strict=True):
                residues = mutated(variant.variant, result.wild_type.sequence, result.first_position)
                known = ["" if variant.measured is None else variant.measured] if measured else []
                yield result.wild_type.id, short_form(variant.variant), residues, *own, *known

    return ["mutant", "mutated_sequence", *scores, *(["DMS_score"] if measured else [])], rows()


def _dms_viz(results: Sequence[ProteinVariants], arms: Sequence[str]) -> tuple[list[str], Rows]:
    names = ["site", "wildtype", "mutant", SCORE, *([CONDITION] if len(arms) > 1 else [])]

    def rows() -> Rows:
        for result in results:
            for arm, scores in result.scores.items():
                # One measurement for each substitution and condition.
                seen = set()
                for variant, value in zip(result.variants, scores.values, strict=True):
                    if has_indel(variant.variant):
                        continue
                    parsed = parse_variant(variant.variant, result.wild_type.sequence, result.first_position)
                    place = parsed[0].index, parsed[0].mutant
                    if len(parsed) == 1 and place not in seen:
                        seen.add(place)
                        site = parsed[0].index + result.first_position
                        more = [arm] if len(arms) > 1 else []
                        yield result.wild_type.id, site, parsed[0].wild_type, parsed[0].mutant, value, *more

    return names, rows()
