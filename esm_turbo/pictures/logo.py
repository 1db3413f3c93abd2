"""The sequence logo of designs against the protein that they were designed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import entr

from esm_turbo.files.tabular import counted
from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.pictures.panels import ENTROPY, Array, Lines, Logo, Sheet, Table, Tracks
from esm_turbo.tasks.generation.notation import residues_at, tokens_of
from esm_turbo.tasks.generation.records import GeneratedSequence

LOGO = (
    "Height is the share of designs with a residue, colours are classes: basic, acidic, polar, aromatic, aliphatic,"
    " and G, P, C"
)
"""How to read the letters."""


def logo_sheet(designs: Sequence[GeneratedSequence], given: str, used: str) -> Sheet:
    """Residues of the designs of one protein at the positions that are new.

    Args:
        designs: samples of one protein; all have the same positions.
        given: residues of that protein; positions beyond it were appended.
        used: what made the designs.
    """
    positions = designs[0].positions
    residues = [list(residues_at(one.sequence, positions)) for one in designs]
    frequencies = design_frequencies(residues)
    before = [token if len(token) == 1 else "" for token in tokens_of(given)]
    below = [before[position - 1] if position <= len(before) else "" for position in positions]
    log_probs = np.array([one.log_probs for one in designs])
    tracks = design_tracks(frequencies, log_probs, positions)
    kept = ""
    if any(below):
        at = [RESIDUE_ORDER.find(letter) if letter else -1 for letter in below]
        shares = np.array([row[index] if index >= 0 else np.nan for row, index in zip(frequencies, at, strict=True)])
        tracks.append(Lines(positions, {"kept": shares}, "position", "input kept\n(share)", filled=True, limits=(0, 1)))
        kept = " The letters below are the input's."
    caption = f"{used}. {LOGO}.{kept} Entropy is that of the designs; log p is the model's when a residue was drawn."
    columns: dict[str, list[Any]] = {
        "sample": [one.sample for one in designs],
        "new_residues": ["".join(drawn) for drawn in residues],
        "mean_log_prob": [float(np.mean(one.log_probs)) for one in designs],
        "seed": [one.seed for one in designs],
        "sequence": [one.sequence for one in designs],
    }
    if None in columns["seed"]:
        del columns["seed"]
    table = Table([*columns], [*zip(*columns.values(), strict=True)])
    title = f"{designs[0].record}: {counted(len(designs), 'design')}, {counted(len(positions), 'new residue')}"
    return Sheet(title, caption, [Tracks(tracks, positions, below)], table)


def design_tracks(frequencies: Array, log_probs: Array, positions: Sequence[int]) -> list[Logo | Lines]:
    """The logo of designs, their entropy and the mean log-probability of their residues.

    Args:
        frequencies: of the residues, [positions, 20].
        log_probs: of the residues of each design, [designs, positions].
        positions: their numbers.
    """
    return [
        Logo(frequencies, "share of designs"),
        Lines(positions, {"entropy": design_entropies(frequencies)}, "position", "entropy\n(bits)", limits=ENTROPY),
        Lines(positions, {"mean log p": log_probs.mean(axis=0)}, "position", "mean log p\n(nats)"),
    ]


def design_frequencies(designs: Sequence[Sequence[str]]) -> Array:
    """Share of designs that have each residue, [positions, 20] in `RESIDUE_ORDER`; X and the like have the rest.

    Args:
        designs: residues of each, as many of all.
    """
    residues = np.array([list(one) for one in designs])
    return np.array([(residues == letter).mean(axis=0) for letter in RESIDUE_ORDER]).T


def design_entropies(frequencies: Array) -> Array:
    """Entropy of the residues at each position, bits, [positions]; X and the like are one more."""
    others = (1 - frequencies.sum(axis=1)).clip(0)
    bits: Array = (entr(frequencies).sum(axis=1) + entr(others.round(9))) / np.log(2)
    return bits
