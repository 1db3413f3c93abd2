"""Proteins by the names that tables give them."""

from __future__ import annotations

import pytest

from esm_turbo.proteins.fasta import ProteinRecord, uniprot_parts
from esm_turbo.proteins.lookup import ProteinIndex, UnknownProteinError, shown

RECORDS = [
    ProteinRecord("sp|P69905|HBA_HUMAN", "MVLS"),
    ProteinRecord("one", "MKT"),
    ProteinRecord("two", "MKT"),
    ProteinRecord("MKTA", "GSW"),
    ProteinRecord("other", "MKTA"),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sp|P69905|HBA_HUMAN", 0),
        ("P69905", 0),
        ("HBA_HUMAN", 0),
        ("mvls", 0),
        ("two", 2),
        # Of equal sequences the first; an identifier goes before a sequence.
        ("MKT", 1),
        ("MKTA", 3),
    ],
)
def test_names(name: str, found: int) -> None:
    assert ProteinIndex(RECORDS).find(name) is RECORDS[found]


ALL = "there are 'sp|P69905|HBA_HUMAN', 'one', 'two' and 2 more"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sp", ALL),
        ("M", ALL),
        ("", ALL),
        ("ONE", "did you mean 'one'?"),
        ("P6905", "did you mean 'P69905'?"),
        ("HBB_HUMAN", "did you mean 'HBA_HUMAN'?"),
        ("MKTAS", "did you mean 'MKTA'?"),
        ("sp|P69905|HBB_HUMAN", "did you mean 'sp|P69905|HBA_HUMAN'?"),
        ("MKTA" * 20, ALL),
    ],
)
def test_other_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(UnknownProteinError) as caught:
        ProteinIndex(RECORDS, "target").find(name)
    assert str(caught.value) == f"there is no usable target {shown(name)}; {hint}"
    assert (caught.value.name, caught.value.noun) == (name, "target")
    assert caught.value.known == [record.id for record in RECORDS]


def test_a_sequence_of_two_numberings_names_neither() -> None:
    records = [ProteinRecord("a", "MKT", f"first_position={first}") for first in (1, 3)]
    with pytest.raises(UnknownProteinError):
        ProteinIndex(records).find("MKT")
    assert ProteinIndex(records[:1] * 2).find("MKT") is records[0]


def test_a_part_of_two_identifiers_names_neither() -> None:
    records = [ProteinRecord("sp|P1|A_X", "M"), ProteinRecord("tr|P1|B_X", "K"), ProteinRecord("sp|P2|A_X", "T")]
    index = ProteinIndex(records)
    for name in ("P1", "A_X"):
        with pytest.raises(UnknownProteinError):
            index.find(name)
    assert index.find("B_X") is records[1] and index.find("P2") is records[2]


@pytest.mark.parametrize(("identifier", "name"), [("P69905", "sp|P69905|HBA_HUMAN"), ("sp|P12345|P12345", "P12345")])
def test_one_identifier_is_a_part_of_the_other(identifier: str, name: str) -> None:
    [record] = records = [ProteinRecord(identifier, "MVLS")]
    assert ProteinIndex(records).find(name) is record


@pytest.mark.parametrize(
    ("identifier", "parts"),
    [
        ("tr|A0A024R161|A0A024R161_HUMAN", ("A0A024R161", "A0A024R161_HUMAN")),
        ("sp|P04637-2|P53_HUMAN", ("P04637-2", "P53_HUMAN")),
        ("gi|1|x", ()),
        ("P69905", ()),
        ("sp|P69905|", ()),
    ],
)
def test_parts_of_identifiers(identifier: str, parts: tuple[str, ...]) -> None:
    assert uniprot_parts(identifier) == parts
