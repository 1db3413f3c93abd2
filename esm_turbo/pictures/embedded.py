"""Pictures of a run of `esm-turbo embed`, from the files that it wrote."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from esm_turbo.files.csv_files import CsvError, read_csv
from esm_turbo.pictures.embeddings import contact_sheet, map_sheet
from esm_turbo.pictures.panels import Array, Sheet
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.lookup import ProteinIndex, UnknownProteinError
from esm_turbo.tasks.common.options import EmbeddingFormat
from esm_turbo.tasks.embedding.reading import read_embeddings

_NONE = "not given"


@dataclass(frozen=True)
class Groups:
    """The property that colours proteins.

    Attributes:
        label: name of the column.
        by_id: its text for each protein that has one.
    """

    label: str
    by_id: dict[str, str]

    def of(self, proteins: Sequence[ProteinRecord]) -> Sequence[str] | Array:
        """Numbers if every protein has one, and else names."""
        texts = [self.by_id.get(protein.id, _NONE) for protein in proteins]
        try:
            return np.array(texts, dtype=np.float64)
        except ValueError:
            return texts


def read_groups(path: str | os.PathLike[str], proteins: Sequence[ProteinRecord], column: str | None = None) -> Groups:
    """Read what colours proteins from a table with a column `id`; rows of other proteins are left out.

    Args:
        path: a CSV or TSV file.
        proteins: the proteins.
        column: name of the column; None takes the first besides `id`.

    Raises:
        ValueError: the table lacks a column, or has none of the proteins.
    """
    rows = read_csv(path, ["id", *([column] if column is not None else [])])
    names = [name for name in rows[0].cells if name.lower() != "id"] if rows else []
    if not names:
        raise CsvError(f"{os.fspath(path)}: needs a column besides 'id', and at least one row")
    label = next(name for name in names if column is None or name.lower() == column.lower())
    index, found = ProteinIndex(proteins), dict[str, str]()
    for row in rows:
        try:
            protein = index.find(row["id"])
        except UnknownProteinError:
            continue
        if row.cells[label]:
            found[protein.id] = row.cells[label]
    if not found:
        raise CsvError(
            f"{os.fspath(path)}: names none of the proteins, such as {proteins[0].id!r}; correct its column 'id'"
        )
    return Groups(label, found)


def check_drawable(proteins: int, include: Collection[str]) -> int:
    """Number of sheets of a run: a map of means, and a contact map for each protein.

    Raises:
        ValueError: there is nothing to draw.
    """
    sheets = ("mean" in include and proteins > 1) + ("contacts" in include) * proteins
    if not sheets:
        raise ValueError(
            "a picture shows contacts, or means of at least two proteins: give --include contacts or mean,"
            f" got {' '.join(sorted(include))} for {proteins}"
        )
    return sheets


def embedding_sheets(
    out: Path,
    file_format: EmbeddingFormat,
    layers: Sequence[int],
    proteins: Sequence[ProteinRecord],
    truncated_to: int | None,
    used: str,
    groups: Groups | None = None,
) -> list[Sheet]:
    """Sheets of the proteins that were embedded.

    Args:
        out: what the run wrote.
        file_format: how.
        layers: layers that were saved; the last one is drawn.
        proteins: those that it holds.
        truncated_to: number of residues of each at most; None for all.
        used: what they were computed with.
        groups: what colours them.
    """
    means: list[Array] = []
    contacts: list[Sheet] = []
    for protein, arrays in zip(proteins, read_embeddings(out, file_format, proteins), strict=True):
        mean = arrays.get(f"mean_representations.{max(layers)}")
        if mean is not None:
            means.append(mean.astype(np.float64))
        if "contacts" in arrays:
            shown = replace(protein, sequence=protein.sequence[:truncated_to])
            contacts.append(contact_sheet(shown, arrays["contacts"].astype(np.float64), used))
    if len(means) < 2:
        return contacts
    names = [protein.id for protein in proteins]
    colours = None if groups is None else groups.of(proteins)
    label = "" if groups is None else groups.label
    return [map_sheet(names, np.array(means), f"{used}, layer {max(layers)}", colours, label), *contacts]
