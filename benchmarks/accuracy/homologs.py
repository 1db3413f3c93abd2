"""Accuracy of presets after homologs, with the small model of E1, and what a frozen query costs besides."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.harness.embedded import rounded, small_model
from benchmarks.harness.measure import Case, Check, Figures, largest_difference
from esm_turbo import TurboEsm
from esm_turbo.assets import evaluation_families
from esm_turbo.config import PRODUCT_PRESETS, TurboConfig
from esm_turbo.evaluate.contexts import prefill, to_float64
from esm_turbo.evaluate.families import MASKED_APART, masked_rows
from esm_turbo.evaluate.metrics import Outputs, TokenErrors
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, read_fasta_strict
from esm_turbo.proteins.homologs import SEPARATOR, join_families

MODEL = "e1-mini"
HOMOLOGS = (0, 1, 4, 16)
# Members of a family are cut there, as in training.
_LONGEST = 400
# Of each protein, spread over it.
_POSITIONS = 12
_REFRESHED = (0, 8, 32)
# Logits are of size ten.
_TOLERANCE = 1e-4


def cases(max_families: int | None = None) -> Iterator[Case]:
    """Rows of every preset, for every number of homologs.

    Args:
        max_families: use only the first N families; None for all.
    """
    for homologs in HOMOLOGS:
        yield Case(
            f"{homologs} homologs",
            MODEL,
            {"dtype": "float32", "homologs": homologs, "max_proteins": max_families},
            _check,
            functools.partial(_measure, homologs, max_families),
        )


def frozen_query_cases(max_families: int | None = None) -> Iterator[Case]:
    """Rows of frozen queries after four homologs, by residues refreshed.

    Args:
        max_families: use only the first N families; None for all.
    """
    yield Case(
        "frozen queries",
        MODEL,
        {"dtype": "float32", "homologs": 4, "positions": _POSITIONS, "max_proteins": max_families},
        _check,
        functools.partial(_measure_frozen, max_families),
    )


def _families(max_families: int | None) -> list[list[str]]:
    joined = join_families(read_fasta_strict(evaluation_families()))[:max_families]
    return [[one[:_LONGEST] for one in record.sequence.split(SEPARATOR)] for record in joined]


@functools.cache
@torch.no_grad()
def _check() -> Check:
    """Full-precision contexts against the model without a cache."""
    turbo = small_model(MODEL)
    *homologs, protein = _families(1)[0][:3]
    [cache] = _caches(turbo, homologs, [PRODUCT_PRESETS["exact"]]).values()
    ids = turbo.codes.whole(turbo.codes.encode(protein, "it"))
    whole = torch.tensor([[*_context(turbo, homologs), *ids]])
    expected = turbo.model(whole).logits[:, -len(ids) :]
    found = turbo.extend(cache, protein).logits
    return Check(
        "logits after full-precision contexts against those without a cache, largest difference",
        largest_difference(found, expected),
        _TOLERANCE,
    )


def _context(turbo: TurboEsm, homologs: Sequence[str]) -> list[int]:
    return [token for one in homologs for token in turbo.codes.whole(turbo.codes.encode(one, "it"))]


def _caches(
    turbo: TurboEsm, homologs: Sequence[str], configs: Sequence[TurboConfig]
) -> Mapping[TurboConfig, TurboKVCache]:
    ids = torch.tensor([_context(turbo, homologs)])
    return prefill(turbo.model, configs, ids, torch.ones_like(ids))[1]


@torch.no_grad()
def _measure(homologs: int, max_families: int | None, repeats: int) -> list[Figures]:
    """Every residue of the last of each family, one in seven masked at a time, after up to so many of the others."""
    begin = time.perf_counter()
    turbo = small_model(MODEL)
    # Without homologs nothing is stored.
    presets = PRODUCT_PRESETS if homologs else {"exact": PRODUCT_PRESETS["exact"]}
    errors: dict[str, list[TokenErrors]] = {name: [] for name in presets}
    losses: dict[str, list[float]] = {name: [] for name in presets}
    read, families = [], _families(max_families)
    for *others, protein in families:
        chosen = others[:homologs]
        read.append(len(chosen))
        rows = masked_rows(protein, turbo.codes.mask_symbol)
        place = np.arange(len(protein))
        at, ids = (place % MASKED_APART, place + len(turbo.codes.before)), turbo.codes.encode(protein, "it")
        caches = _caches(turbo, chosen, list(presets.values())) if chosen else {}
        reference = None
        for name, config in presets.items():
            if chosen:
                output = turbo.extend(caches[config], rows)
                states, logits = output.hidden_states, output.logits
            else:
                tokens, mask = turbo.codes.batch([turbo.codes.whole(turbo.codes.encode(row, "it")) for row in rows])
                whole = turbo.model(tokens, mask, output_hidden_states=True)
                states, logits = whole.hidden_states[-1], whole.logits
            found = Outputs(to_float64(states)[at], to_float64(logits)[at])
            reference = found if reference is None else reference
            errors[name].append(TokenErrors.compare(reference, found))
            log_probabilities = torch.from_numpy(found.logits).log_softmax(-1).numpy()
            losses[name] += (-log_probabilities[place, ids]).tolist()
    taken, exact = time.perf_counter() - begin, math.exp(np.mean(losses["exact"]))
    rows_made = []
    for name in presets:
        perplexity = math.exp(np.mean(losses[name]))
        figures = {
            "preset": name,
            "perplexity": perplexity,
            "perplexity_over_exact": perplexity / exact,
            **asdict(TokenErrors.join(errors[name]).accuracy()),
        }
        size = {"families": len(families), "residues": len(losses[name]), "homologs_read": float(np.mean(read))}
        rows_made.append(rounded({**figures, **size, "proteins": evaluation_families().name, "seconds_taken": taken}))
    return rows_made


def _measure_frozen(max_families: int | None, repeats: int) -> list[Figures]:
    """Scores of all substitutions at some positions, by whole queries and by frozen ones."""
    turbo = small_model(MODEL)
    exact: list[float] = []
    frozen: dict[int, list[float]] = {refresh: [] for refresh in _REFRESHED}
    seconds = dict.fromkeys((None, *_REFRESHED), 0.0)
    families = _families(max_families)
    for *others, protein in families:
        positions = np.linspace(0, len(protein) - 1, _POSITIONS).astype(int)
        variants = [f"{protein[i]}{i + 1}{new}" for i in positions for new in STANDARD_RESIDUES if new != protein[i]]
        given: dict[str, Any] = {"arm": "frozen", "context": ",".join(others[:4])}
        for refresh in seconds:
            more = {} if refresh is None else {"freeze_query": True, "refresh": refresh}
            begin = time.process_time()
            values = turbo.score_variants(protein, variants, **given, **more).values
            seconds[refresh] += time.process_time() - begin
            (exact if refresh is None else frozen[refresh]).extend(values)
    size = {"families": len(families), "variants": len(exact), "proteins": evaluation_families().name}
    return [
        rounded(
            {
                "refresh": refresh,
                "spearman": float(spearmanr(exact, values).statistic),
                "error_mean": float(np.abs(np.subtract(values, exact)).mean()),
                "error_max": float(np.abs(np.subtract(values, exact)).max()),
                "score_sd": float(np.std(exact)),
                "speedup": seconds[None] / seconds[refresh],
                **size,
            }
        )
        for refresh, values in frozen.items()
    ]
