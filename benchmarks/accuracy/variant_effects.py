"""Variant effects in the three arms: against measured fitness, and leakage of residues from a frozen protein."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks.accuracy.screening import with_preset
from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded
from benchmarks.harness.measure import Case, Figures
from benchmarks.harness.names import variant_arms
from esm_turbo.assets import EMBEDDED_MODEL, evaluation_proteins
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord, read_fasta_strict
from esm_turbo.tasks.common.rankings import spearman
from esm_turbo.tasks.variants.records import read_variants

PROTEIN, MEASURED, FIRST_POSITION = "blat_ecolx.fasta", "blat_ecolx_ranganathan2015.csv", 24
_DOMAINS = 20


def cases(max_proteins: int | None = None) -> Iterator[Case]:
    """Fitness of one protein, and leakage on domains."""
    folder = evaluation_proteins().parent
    [record] = read_fasta_strict(folder / PROTEIN)
    domains = evaluation_set("cath_val200")
    count = min(_DOMAINS, max_proteins or _DOMAINS)
    domains = [domains[index * len(domains) // count] for index in range(count)]

    def fitness(repeats: int) -> Figures:
        return rounded(_fitness(record))

    def leak(repeats: int) -> Figures:
        return rounded(_leak(domains))

    yield Case("fitness", EMBEDDED_MODEL.name, {"dtype": "float32"}, lambda: exactness(record), fitness)
    yield Case("leak", EMBEDDED_MODEL.name, {"dtype": "float32"}, lambda: exactness(domains[0]), leak)


def _fitness(record: ProteinRecord) -> Figures:
    measured, _ = read_variants(evaluation_proteins().with_name(MEASURED), [record], first_position=FIRST_POSITION)
    names, fitness = [one.variant for one in measured], [one.measured or 0.0 for one in measured]
    turbo, found, full = embedded(), {}, None
    for name, (preset, options) in variant_arms().items():
        call = partial(turbo.score_variants, record.sequence, names, first_position=FIRST_POSITION, **options)
        scores = with_preset(turbo, preset, call).values
        full = scores if full is None else full
        found[name] = {
            "spearman_with_measured": spearman(scores, fitness),
            "spearman_with_full": spearman(scores, full),
        }
    return {"protein": record.id, "residues": len(record.sequence), "variants": len(names), "arms": found}


def _leak(domains: Sequence[ProteinRecord]) -> Figures:
    """Predictions of every arm at masked positions, against the full arm.

    A model that can see the masked residue assigns it a higher probability than when the whole protein is run with the
    mask. `wild_type_gain` is the mean gain over all positions, in nats; `divergence` is the KL divergence over the 20
    residues.
    """
    turbo = embedded()
    logs: dict[str, list[np.ndarray]] = {name: [] for name in variant_arms()}
    places: list[np.ndarray] = []
    for record in domains:
        sequence = record.sequence
        names = [f"{a}{i}{m}" for i, a in enumerate(sequence, 1) if a in STANDARD_RESIDUES for m in STANDARD_RESIDUES]
        kept = [a for a in sequence if a in STANDARD_RESIDUES]
        places.append(np.array([STANDARD_RESIDUES.index(a) for a in kept]))
        for name, (preset, options) in variant_arms().items():
            values = with_preset(turbo, preset, partial(turbo.score_variants, sequence, names, **options)).values
            # Scores are relative to the wild type; normalised over the 20 residues they are log-probabilities again.
            scores = np.array(values).reshape(len(kept), len(STANDARD_RESIDUES))
            logs[name].append(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
    at = np.concatenate(places)
    rows = np.arange(len(at))
    full = np.concatenate(logs["full, masked"])
    found = {}
    for name, parts in logs.items():
        ours = np.concatenate(parts)
        found[name] = {
            "wild_type_gain": float((ours[rows, at] - full[rows, at]).mean()),
            "divergence": float((np.exp(full) * (full - ours)).sum(axis=1).mean()),
            "wild_type_first": float((ours.argmax(axis=1) == at).mean()),
        }
    return {"proteins": "cath_val200.fasta", "tested": len(domains), "positions": len(at), "arms": found}
