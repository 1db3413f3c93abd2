"""Embedded proteins: a map of all of them, and predicted contacts of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esm_turbo.files.tabular import counted
from esm_turbo.pictures.panels import Array, Heatmap, Scatter, Sheet, Table
from esm_turbo.proteins.fasta import ProteinRecord

# Residues closer in the sequence are in contact anyhow.
_APART = 6
_LABELLED = 12


def map_sheet(
    names: Sequence[str], means: Array, used: str, groups: Sequence[str] | Array | None = None, group_label: str = ""
) -> Sheet:
    """Proteins by the two largest principal components of their mean embeddings.

    Args:
        names: of the proteins, at least two.
        means: mean embeddings, [proteins, hidden_size].
        used: what they were computed with.
        groups: of the proteins: names, or numbers.
        group_label: what these are.
    """
    places, shares = principal_components(means)
    labels = dict(enumerate(names)) if len(names) <= _LABELLED else {}
    axes = [f"PC{number} ({share:.0%} of the variance)" for number, share in enumerate(shares, start=1)]
    points = Scatter(places[:, 0], places[:, 1], names, axes[0], axes[1], groups=groups, group_label=group_label,
                     labels=labels)  # fmt: skip
    caption = f"{used}. Principal components of the mean embeddings, centred and not scaled."
    columns, rows = ["id", "PC1", "PC2"], [[n, float(x), float(y)] for n, (x, y) in zip(names, places, strict=True)]
    if groups is not None:
        columns.append(group_label)
        values = groups.tolist() if isinstance(groups, np.ndarray) else groups
        rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
    return Sheet(f"{counted(len(names), 'protein')} by mean embedding", caption, [[points]], Table(columns, rows))


def principal_components(means: Array) -> tuple[Array, tuple[float, float]]:
    """The two largest principal components, [proteins, 2], and their shares of the variance.

    The largest value of each component is positive, so that the same embeddings always give the same map.
    """
    centred = means - means.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    places = np.zeros((len(means), 2))
    found = (left * sizes)[:, :2]
    places[:, : found.shape[1]] = found
    signs = np.sign(places[np.abs(places).argmax(axis=0), [0, 1]])
    shares = np.zeros(2)
    total = float((sizes**2).sum())
    shares[: min(2, len(sizes))] = sizes[:2] ** 2 / total if total else 0.0
    return places * np.where(signs == 0, 1, signs), (float(shares[0]), float(shares[1]))


def contact_sheet(protein: ProteinRecord, contacts: Array, used: str) -> Sheet:
    """The contact map of a protein.

    Args:
        protein: the record, as long as the contacts.
        contacts: predicted probabilities, [residues, residues].
        used: what they were computed with.
    """
    first = protein.first_position or 1
    names = [f"{letter}{position}" for position, letter in enumerate(protein.sequence, start=first)]
    hover = [[f"{a} - {b}" for b in names] for a in names]
    positions = list(range(first, first + len(names)))
    panel = Heatmap(contacts, list(map(str, positions)), positions, "probability of a contact", "position", "position",
                    limits=(0.0, 1.0), names=hover, square=True)  # fmt: skip
    caption = f"{used}. Predicted probability that the C-beta atoms of two residues are within 8 Å."
    pairs = np.argwhere(np.triu(np.ones_like(contacts, dtype=bool), _APART))
    likely = sorted(((float(contacts[a, b]), int(a), int(b)) for a, b in pairs), reverse=True)[: 2 * len(names)]
    rows = [[names[a], names[b], b - a, probability] for probability, a, b in likely]
    table = Table(["residue", "other", "apart", "probability"], rows)
    return Sheet(f"{protein.id}: predicted contacts of {counted(len(names), 'residue')}", caption, [[panel]], table)
