"""Colours that people with any colour vision can tell apart, and the order of residues."""

from __future__ import annotations

from esm_turbo.proteins.fasta import STANDARD_RESIDUES

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Colours of lines and groups (Okabe and Ito 2008), the yellow left out, which is hard to see on white."""

DIVERGING = "RdBu"
"""Red below zero, white at zero, blue above."""

SEQUENTIAL = "viridis"
"""From dark to light."""

MISSING = "#d9d9d9"
INK, MUTED = "#222222", "#666666"

_CLASSES = {
    "RKH": "#0072B2",
    "DE": "#D55E00",
    "QNST": "#009E73",
    "YWF": "#CC79A7",
    "AILMV": "#333333",
    "GPC": "#E69F00",
}
RESIDUE_ORDER = "".join(_CLASSES)
"""The 20 standard residues by chemistry: basic, acidic, polar, aromatic, aliphatic, special; as in dms-viz."""

RESIDUE_COLOURS = {residue: colour for residues, colour in _CLASSES.items() for residue in residues}
"""By class of residue, in the same order."""

assert sorted(RESIDUE_ORDER) == sorted(STANDARD_RESIDUES)
