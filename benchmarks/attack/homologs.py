"""Contexts of homologs, of E1, whose files are damaged or whose model changes before they are used."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import torch

from benchmarks.attack.commands import References
from benchmarks.attack.damage import damage
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, about, library, library_faults
from benchmarks.harness.embedded import SMALL_MODELS
from esm_turbo import ContextStore, TurboEsm, TurboKVCache

__all__ = ["e1", "homologs"]

_RESIDUES = "ACDEFGHIKLMNPQRSTVWYX"
_TOLERANCE = 1e-4


@functools.cache
def e1() -> TurboEsm:
    """The small model of E1; a process that forks must load it, see `commands.turbo`."""
    return TurboEsm.from_pretrained(SMALL_MODELS["e1-mini"], preset="exact", device="cpu")


def homologs(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Variants after homologs, from a saved cache or a store that was damaged, or is of other weights, or neither."""
    folder.mkdir()
    family = ",".join("".join(rng.choices(_RESIDUES, k=rng.randint(1, 40))) for _ in range(rng.randint(1, 6)))
    protein = "".join(rng.choices(_RESIDUES[:-1], k=rng.randint(2, 30)))
    kept, what = rng.choice(("saved", "stored")), rng.choice(("damaged", "changed", "as they are"))
    preset, method = rng.choice(("exact", "turbo3", "turbo2")), rng.choice(("masked", "wild_type"))
    weight, digit = rng.randrange(10**6), rng.choice((0.5, 1e-2))
    path, scores = folder / "cache.safetensors", folder.parent / f"{folder.name}.npy"
    model = e1()

    def scored(context: str | TurboKVCache, store: ContextStore | None = None) -> list[float]:
        arm = "frozen" if preset == "exact" else "turbo"
        return model.score_variants(protein, method=method, context=context, arm=arm, store=store).values

    def use() -> list[float]:
        if kept == "saved":
            return scored(TurboKVCache.load(path, model=model.model))
        with ContextStore(folder / "store") as store:
            return scored(family, store)

    def keep() -> int:
        model.model.set_turbo(calibration=model.calibration, preset=preset)
        if kept == "saved":
            model.prefill(family).save(path)
        else:
            use()
        np.save(scores, scored(family))
        return 0

    def use_again() -> int:
        model.model.set_turbo(calibration=model.calibration, preset=preset)
        expected = np.load(scores)
        if what == "changed":
            parameters = [one for one in model.model.base_model.parameters() if one.dim() == 2]
            chosen = parameters[weight % len(parameters)]
            with torch.no_grad():
                chosen.view(-1)[weight % chosen.numel()] += digit
            expected = np.array(scored(family))
        return 0 if np.allclose(use(), expected, rtol=0, atol=_TOLERANCE) else OTHER_NUMBERS

    said = f"{kept} under {preset}, {what}"
    if (made := library(folder, keep)).code:
        return [Finding("trial failed", f"{said}: {made.err.strip()[-200:]}")]
    if what == "damaged":
        said += f": {damage(rng, [one for one in sorted(folder.rglob('*')) if one.is_file() and one.suffix])}"
    used = library(folder, use_again)
    if used.code == 2 and what == "as they are":
        return [Finding("refused", f"{said}: {used.err.strip()[-200:]}")]
    return about(said, library_faults(used))
