"""Notation of positions, constraints and new residues."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.tasks.generation.notation import (
    format_positions,
    parse_allowed,
    parse_positions,
    parse_template,
    residues_at,
)


@given(st.sets(st.integers(1, 99), min_size=1))
def test_positions_as_text(positions: set[int]) -> None:
    text = format_positions(sorted(positions))
    assert parse_positions(text) == sorted(positions)
    assert all(int(a) < int(b) for a, b in (span.split("-") for span in text.split(",") if "-" in span))


def test_constraints_as_text() -> None:
    assert parse_allowed([]) is None
    assert parse_allowed(["AC"]) == "AC"
    assert parse_allowed(["1=AC", "3-4,7=G"]) == {1: "AC", 3: "G", 4: "G", 7: "G"}


@pytest.mark.parametrize("text", ["GX[KR]{ADG}{ADG}P", "g-x-[kr]-{ADG}(2)-P", " GX[KR] {ADG}(2) P "])
def test_templates(text: str) -> None:
    assert parse_template(text, "ACDG") == ["G", "ACDG", "KR", "C", "C", "P"]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_positions, "x", "positions are written as 10-25,40 and counted from 1, got 'x'"),
        (parse_positions, "3-1", "in ascending order, got '3-1'"),
        (parse_positions, "0-2", "counted from 1"),
        (parse_positions, "3,1-999999999999", "no protein has a position 999,999,999,999, got '1-999999999999'"),
        (parse_allowed, ["x=AC"], "counted from 1"),
        (parse_allowed, ["AC", "5=G"], "letters for all positions, or given as 10=AG 12-15=HP; got 'AC 5=G'"),
        *((parse_template, text, "templates are written as GX[KR]XXP") for text in ("G[KR", "G1", "(2)G", "G[]")),
        (parse_template, "GX{ACDEFGHIKLMNPQRSTVWY}", "leaves no residue at position 3"),
        (parse_template, "A(0)-x(2)-G", "repeats an element 0 times"),
        (parse_allowed, ["10=AG", "9-11=P"], "position 10 is constrained twice"),
    ],
)
def test_invalid_notation(parse: Callable[..., object], text: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text)


@pytest.mark.parametrize(
    ("sequence", "positions", "residues"),
    [("MKTAY", [2, 5], "KY"), ("MK<mask>AY", [2, 5], "KY"), ("<mask>K", [1, 2], "<mask>K"), ("MK", [], "")],
)
def test_residues_at_positions(sequence: str, positions: list[int], residues: str) -> None:
    assert residues_at(sequence, positions) == residues
