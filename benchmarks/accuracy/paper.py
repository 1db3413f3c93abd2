"""The paper's tables on the embedded model: its six proteins one by one, and bytes in published geometries."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from benchmarks.harness.embedded import about, embedded, evaluate, evaluation_set, exactness, rounded
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo import TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli.info import cache_sizes
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, Geometry
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord

TESTED_PRESETS = ("paper", "turbo4", "turbo3", "turbo2", "turbo1")
MEMORY_TOKENS = 1024
GEOMETRIES: Mapping[str, Geometry] = {
    "8M": Geometry(6, 20, 16),
    "35M": Geometry(12, 20, 24),
    "150M": Geometry(30, 20, 32),
    "650M": Geometry(33, 20, 64),
    "3B": Geometry(36, 40, 64),
    "15B": Geometry(48, 40, 128),
}
"""Published ESM-2 sizes."""


def protein_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """Tables 1 and 2: one case per protein of the paper."""
    for protein in evaluation_set("paper_six", max_proteins):
        yield _protein_case(protein)


def memory_cases(geometries: Mapping[str, Geometry] = GEOMETRIES) -> Iterator[Case]:
    """Table 4: bytes of a cache, which depend on the geometry of a model alone; no weights are needed."""
    for name, geometry in geometries.items():
        yield Case(
            name=name,
            model=f"geometry of {name}",
            shape={"tokens": MEMORY_TOKENS, **asdict(geometry)},
            check=_sizes_are_those_of_caches,
            measure=functools.partial(_sizes, name, geometry),
        )


def _protein_case(protein: ProteinRecord) -> Case:
    def measure(repeats: int) -> Figures:
        evaluation = evaluate(
            embedded(), [protein], {name: PRESETS[name] for name in TESTED_PRESETS}, extend_ks=(1,), refresh_ws=(0, 8)
        )
        whole = rounded(evaluation.to_dict())
        return {
            "protein": protein.id,
            "description": protein.description,
            "residues": len(protein.sequence),
            "provenance": about(evaluation),
            "prefill": _prefill(protein),
            "frozen": whole["frozen"],
            "presets": {p["name"]: {k: p[k] for k in ("leave_one_out", "extend")} for p in whole["presets"]},
        }

    return Case(
        name=protein.id,
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "residues": len(protein.sequence)},
        check=lambda: exactness(protein),
        measure=measure,
    )


def _sizes(name: str, geometry: Geometry, repeats: int) -> Figures:
    return {"size": name, **rounded(cache_sizes(geometry, None, MEMORY_TOKENS, 1))}


@torch.no_grad()
def _prefill(protein: ProteinRecord) -> Figures:
    """Cosine and largest difference of the outputs with and without writing caches."""
    turbo = embedded()
    ids = torch.tensor([[turbo.codes.cls, *turbo.codes.encode(protein.sequence, protein.id), turbo.codes.eos]])
    plain = turbo.model(ids, output_hidden_states=True).hidden_states[-1][0].double()
    writing, _ = prefill(turbo.model, [PRESETS[name] for name in TESTED_PRESETS], ids, torch.ones_like(ids))
    written = writing.hidden_states[-1][0].double()
    cosines = torch.cosine_similarity(plain, written, dim=-1)
    return {"cosine_mean": float(cosines.mean()), "largest_difference": float((plain - written).abs().max())}


@functools.cache
def _sizes_are_those_of_caches() -> Check:
    """Compare `cache_sizes` of the embedded model with a cache of it."""
    turbo = embedded()
    sizes = cache_sizes(turbo.model.esm.codec(PRESETS["paper"]).geometry, None, 130, 1)["presets"]
    residues = STANDARD_RESIDUES * 7
    ids = torch.tensor([[turbo.codes.cls, *turbo.codes.encode(residues, "it")[:129]]])
    with torch.no_grad():
        _, caches = prefill(turbo.model, list(PRODUCT_PRESETS.values()), ids, torch.ones_like(ids))
    found: dict[str, TurboKVCache] = {name: caches[config] for name, config in PRODUCT_PRESETS.items()}
    errors = [abs(cache.nbytes - sizes[name]["bytes"]) for name, cache in found.items()]
    return Check("bytes of caches of the embedded model, largest difference", float(max(errors)), 0.0)
