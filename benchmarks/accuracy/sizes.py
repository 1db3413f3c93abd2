"""Bytes of caches in the published geometries of ESM-2."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from benchmarks.harness.embedded import embedded, rounded
from benchmarks.harness.measure import Case, Check, Figures
from esm_turbo import TurboKVCache
from esm_turbo.cli.info import cache_sizes
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, Geometry
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.proteins.fasta import STANDARD_RESIDUES

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


def memory_cases(geometries: Mapping[str, Geometry] = GEOMETRIES) -> Iterator[Case]:
    """Bytes of a cache, which depend on the geometry of a model alone; no weights are needed."""
    for name, geometry in geometries.items():
        yield Case(
            name=name,
            model=f"geometry of {name}",
            shape={"tokens": MEMORY_TOKENS, **asdict(geometry)},
            check=_sizes_are_those_of_caches,
            measure=functools.partial(_sizes, name, geometry),
        )


def _sizes(name: str, geometry: Geometry, repeats: int) -> Figures:
    return {"size": name, **rounded(cache_sizes(geometry, None, MEMORY_TOKENS, 1))}


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
