"""Notation of variants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.proteins.fasta import RESIDUES, STANDARD_RESIDUES
from esm_turbo.tasks.variants.substitutions import (
    MisnumberedError,
    Substitution,
    all_substitutions,
    has_indel,
    mutated,
    parse_variants,
    parts_of,
)

WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQLEERLG"


def test_a_variant_of_several_substitutions() -> None:
    assert parse_variants([" h24c:E26k "], "HPE", 24)[0] == [Substitution("H", 0, "C"), Substitution("E", 2, "K")]


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("H24C", (24, "H", "C")),
        (" h24c: e26K ", ("24;26", "H:E", "C:K")),
        ("M-03A", (-3, "M", "A")),
        ("p.Lys2_Gly4delinsTrpVal", ("2_4", "K_G", "delinsWV")),
        ("p.[(Ala3dup);(Ser5=)]", ("3;5", "A:S", "dup:S")),
    ],
)
def test_parts_of_variants(variant: str, parts: tuple[int | str, str, str]) -> None:
    assert parts_of(variant) == parts


@pytest.mark.parametrize(
    ("variant", "residues", "short"),
    [
        ("p.Met1Ala", "AKTAYIAK", "M1A"),
        ("p.(Met1Ala)", "AKTAYIAK", "M1A"),
        ("NP_000537.3:p.M1A", "AKTAYIAK", "M1A"),
        ("NM_000546.6(TP53):c.1A>G (p.Met1Ala)", "AKTAYIAK", "M1A"),
        ("p.[Met1Ala;Lys2=]", "AKTAYIAK", "M1A:K2K"),
        ("m1a: K02c", "ACTAYIAK", "M1A:K2C"),
        ("p.Lys2del", "MTAYIAK", "K2del"),
        ("K2_A4del", "MYIAK", "K2_A4del"),
        ("p.Lys2_Thr3insGlnSer", "MKQSTAYIAK", "K2_T3insQS"),
        ("p.Lys2delinsTrpVal", "MWVTAYIAK", "K2delinsWV"),
        ("p.Lys2delinsTrp", "MWTAYIAK", "K2W"),
        ("K2_T3dup", "MKTKTAYIAK", "K2_T3dup"),
        ("K2R:K2_T3insW:T3del", "MRWAYIAK", "K2R:K2_T3insW:T3del"),
    ],
)
def test_notations_of_substitutions_insertions_and_deletions(variant: str, residues: str, short: str) -> None:
    assert mutated(variant, "MKTAYIAK") == mutated(short, "MKTAYIAK") == residues
    assert parts_of(variant) == parts_of(short)
    assert has_indel(variant) == any(one in short for one in ("del", "dup", "ins"))
    if not has_indel(variant):
        assert parse_variants([variant], "MKTAYIAK")[0] == parse_variants([short], "MKTAYIAK")[0]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("K2_M1del", "must begin before it ends"),
        ("K2_A4insW", "must name the two residues between which it is"),
        ("K2insW", "must name the two residues between which it is"),
        ("K2_T3del:T3A", "its changes overlap"),
        ("K2_T3insA:K2_T3insC", "its changes overlap"),
        ("M1_K8del", "leaves nothing of the protein"),
        ("K2_T3insJ", "the mutant must be one of"),
        ("K2_T9del", "position 9 lies outside the protein, 1 to 8"),
        ("K2_A3del", "residue 3 is T"),
        ("K2_T3ins", "is not a variant"),
        ("p.Lys2delinsTer", "K2delinsTer changes where the protein ends, which has no score"),
        ("p.(Lys2_Thr3delinsLeuTer)", "K2_T3delinsLTer changes where the protein ends"),
        ("p.Lys2_Thr3insTer", "K2_T3insTer changes where the protein ends"),
        ("p.Lys2delinsTrpfs", "K2delinsWfs changes where the protein ends"),
        ("p.Lys2_Thr3insGlnext", "K2_T3insQext changes where the protein ends"),
        ("p.Lys2_Thr3insAlaMse", "is not a variant: Mse names no residue"),
        ("p.Lys2_Thr3insStpAla", "is not a variant: Stp names no residue"),
        ("p.Lys2delinsPyr", "is not a variant: Pyr names no residue"),
        ("k2_t3inster", "ter may be letters or names; write TER or Ter"),
        ("K2delinsalagly", "alagly may be letters or names; write ALAGLY or AlaGly"),
        ("p.Lys2Xle", "is not a variant: Xle names no residue"),
        ("p.Lyz2Ala", "is not a variant: Lyz names no residue"),
    ],
)
def test_invalid_insertions_and_deletions(variant: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mutated(variant, "MKTAYIAK")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("", "'' is not a variant: write the residue, its position and the mutant, such as H24C"),
        ("M1", "'M1' is not a variant"),
        ("1A", "'1A' is not a variant"),
        ("p.[Met1Ala];[Lys2Arg]", "'p.[Met1Ala];[Lys2Arg]' is not a variant"),
        ("p.Met1Ala(;)Lys2Arg", "'p.Met1Ala(;)Lys2Arg' is not a variant"),
        ("p.Met1[Ala]", "'p.Met1[Ala]' is not a variant"),
        ("M1A,K2R", "'M1A,K2R' is not a variant"),
        ("M1A:", "'M1A:' is not a variant"),
        ("M1del", "'M1del': M1del has no marginals, which are of substitutions, such as V10G:I11G"),
        ("M1_T3A", "'M1_T3A': M1_T3A puts one residue in place of several; write delinsA"),
        ("p.Met1fs", "'p.Met1fs' is not a variant: M1fs changes where the protein ends"),
        ("p.(Met1*)", "'p.(Met1*)' is not a variant: M1* changes where the protein ends"),
        ("c.1A>G", "'c.1A>G' is not a variant: write the residue"),
        ("p.Lys1Ala", "'p.Lys1Ala': residue 1 is M; "),
        ("M0A", "'M0A': position 0 lies outside the protein, 1 to 28"),
        ("G29A", "'G29A': position 29 lies outside the protein, 1 to 28"),
        ("K1A", "'K1A': residue 1 is M; "),
        ("M1J", "'M1J': the mutant must be one of ACDEFGHIKLMNPQRSTVWYOU, got J"),
        ("M1x", "'M1x': the mutant must be one of ACDEFGHIKLMNPQRSTVWYOU, got X"),
        ("M1A:M1C", "'M1A:M1C' names position 1 twice"),
        (f"M{10**30}A", f"'M{10**30}A': position {10**30} lies outside the protein"),
        # Of more digits than Python reads.
        (f"M{'9' * 5000}A", f"'M{'9' * 5000}A': position {'9' * 5000} lies outside the protein"),
        # Letters that only fold to residues.
        ("M1\u017f", "'M1\u017f' is not a variant"),
        ("\u212a1A", "'\u212a1A' is not a variant"),
    ],
)
def test_invalid_variants(variant: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_variants([variant], WILD_TYPE)[0]
    assert str(caught.value).startswith(message)
    # The first bad one of many is named.
    with pytest.raises(ValueError) as caught:
        parse_variants(["M1A:K2C", variant, "", "A4C"], WILD_TYPE)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("variants", "cause"),
    [
        # K is residue 2, 8 and 16; W nowhere; Y residue 5 alone.
        (["K1A"], "'K1A': residue 1 is M; is 1 the position of the first residue? `first_position` sets it"),
        (["W1A"], "'W1A': residue 1 is M; no numbering fits; another protein or isoform?"),
        (["Y28A"], "residue 28 is G; is 1 the position of the first residue? With `first_position` 24, it fits"),
        (["Y128A"], "1 to 28; is 1 the position of the first residue? With `first_position` 124"),
        (["K25A:T26C"], "is 1 the position of the first residue? With `first_position` 24, all 2 residues fit"),
        (["K25A", "m24a", "T26A", "W27A"], "With `first_position` 24, 3 of 4 residues fit"),
        (
            ["K1A", "M1A", "K2R", "T3A"],
            "'K1A': residue 1 is M; "
            "counted from 1, the protein has 3 of the 4 residues that the variants name: correct this one",
        ),
        (
            ["K1A", "M1A"],
            "'K1A': residue 1 is M; "
            "counted from 1, the protein has 1 of the 2 residues that the variants name: correct this one",
        ),
        # As residues 16 and 17 both would fit.
        (
            ["K2A", "S3A"],
            "'S3A': residue 3 is T; "
            "counted from 1, the protein has 1 of the 2 residues that the variants name: correct this one",
        ),
        (["W1A", "W2A", "M1A"], "no numbering fits most of them; another protein or isoform?"),
        ([f"M{'9' * 30}A"], "lies outside the protein, 1 to 28; no numbering fits"),
    ],
)
def test_the_likely_cause_of_variants_that_do_not_fit(variants: list[str], cause: str) -> None:
    with pytest.raises(MisnumberedError) as caught:
        parse_variants(variants, WILD_TYPE)
    assert cause in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.found}; ")


def test_the_likely_cause_of_very_many_variants() -> None:
    protein = "".join(random.Random(0).choices(RESIDUES, k=4000))
    shifted = [f"{residue}{position}A" for position, residue in enumerate(protein, start=24)]
    with pytest.raises(MisnumberedError, match=r"With `first_position` 24, 4,000 of 4,500 residues fit"):
        parse_variants([*shifted, *(f"A{position}C" for position in range(9000, 9500))], protein)
    with pytest.raises(MisnumberedError, match="residues fit"):
        parse_variants([f"A{position}C" for position in range(50_000, 70_000)], "A" * 20_000)


@given(st.text(RESIDUES, min_size=1, max_size=5), st.integers(-10, 500))
def test_every_substitution_has_a_name(wild_type: str, first_position: int) -> None:
    names = all_substitutions(wild_type, first_position)
    parsed = [one for own in parse_variants(names, wild_type, first_position) for one in own]
    expected = [
        Substitution(residue, index, mutant)
        for index, residue in enumerate(wild_type)
        for mutant in STANDARD_RESIDUES
        if mutant != residue
    ]
    assert parsed == expected


def test_positions_may_begin_with_zeros() -> None:
    assert parse_variants([f"m{'0' * 30}1a"], WILD_TYPE)[0] == [Substitution("M", 0, "A")]
