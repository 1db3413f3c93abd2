"""Candidates per second: recomputed with their target for every mask, and as extensions of the target's cached context.

The extension by a candidate and the context of the target are timed separately, and combined for screens of 20, 100 and
1,000 candidates of the same length, which share the context.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.harness.embedded import embedded, plain_model
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, spread, worst
from benchmarks.harness.names import REFRESHES, SCREENS
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET, DEFAULT_REFRESH
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.common.forwards import prefill_ids
from esm_turbo.tasks.common.options import Background
from esm_turbo.tasks.scoring.score import Scores
from esm_turbo.tasks.scoring.specificity import background_contexts
from esm_turbo.tasks.variants.many import score_variants

# Log-probabilities in nats.
_TOLERANCE = 1e-4
_CHECKED_RESIDUES = 60


def candidate_cases(
    *,
    target_residues: int,
    candidate_residues: int,
    full_candidates: int,
    cached_candidates: int,
    refreshes: Sequence[int] = REFRESHES,
    at_least: float,
) -> Iterator[Case]:
    """Scoring candidates on one target in the three arms, by number of residues refreshed.

    Args:
        target_residues: residues of the target.
        candidate_residues: residues per candidate.
        full_candidates: candidates per call of the arm `full`.
        cached_candidates: candidates per call of the cached arms.
        refreshes: residues refreshed in the cached arms; must include the default.
        at_least: target for the speedup of the arm `turbo` over `full`, in candidates per second.
    """
    turbo = embedded()
    target, *candidates = _proteins([target_residues, *[candidate_residues] * cached_candidates])
    ids = [turbo.codes.cls, *turbo.codes.encode(target, "target")]
    arms = {"frozen": "exact", "turbo": DEFAULT_PRESET}

    def measure(repeats: int) -> Figures:
        caches = {arm: prefill_ids(turbo, ids, arm) for arm in arms}
        parts = {"full": [partial(turbo.score, target, candidates[:full_candidates], arm="full")]}
        for arm, cache in caches.items():
            parts[f"context {arm}"] = [partial(prefill_ids, turbo, ids, arm)]
            for refresh in refreshes:
                parts[f"{arm}, {refresh} refreshed"] = [partial(turbo.score, cache, candidates, refresh=refresh)]
        seconds = spread(interleave(parts, repeats))
        one = {arm: times["p50"] / cached_candidates for arm, times in seconds.items() if "refreshed" in arm}
        full = seconds["full"]["p50"] / full_candidates
        rates = {"full": 1 / full}
        ratios = {}
        for arm, each in one.items():
            context = seconds[f"context {arm.partition(',')[0]}"]["p50"]
            for screen in SCREENS:
                rates[f"{arm}, {screen} candidates"] = screen / (context + screen * each)
                ratios[f"{arm}, {screen} candidates / full"] = full * rates[f"{arm}, {screen} candidates"]
        return {"seconds": seconds, "candidates_per_second": rates, "ratios": ratios}

    yield Case(
        name=f"{candidate_residues} residues on {target_residues}, cpu",
        model=EMBEDDED_MODEL.name,
        shape={
            "device": "cpu",
            "dtype": "float32",
            "target_residues": target_residues,
            "candidate_residues": candidate_residues,
            "full_candidates": full_candidates,
            "cached_candidates": cached_candidates,
            "presets": arms,
        },
        check=_check_candidates,
        measure=measure,
        targets=[Target(("ratios", f"turbo, {DEFAULT_REFRESH} refreshed, 1000 candidates / full"), at_least=at_least)],
    )


def background_cases(*, targets: int, target_residues: int, candidates: int, candidate_residues: int) -> Iterator[Case]:
    """Processor time of a screen of all pairs without a background, and with each.

    Args:
        targets: their number.
        target_residues: residues of each.
        candidates: their number.
        candidate_residues: residues of each.
    """
    turbo = embedded()
    made = _proteins([target_residues] * targets + [candidate_residues] * candidates)
    proteins, peptides = made[:targets], made[targets:]
    backgrounds: tuple[Background, ...] = ("none", "alone", "targets", "decoys")

    def measure(repeats: int) -> Figures:
        seconds = {name: list[float]() for name in backgrounds}
        turbo.score_pairs(proteins[:2], peptides[:20])
        for _ in range(repeats):
            for name in backgrounds:
                begin = time.process_time()
                turbo.score_pairs(proteins, peptides, background=name)
                seconds[name].append(time.process_time() - begin)
        least = {name: min(own) for name, own in seconds.items()}
        ratios = {name: least[name] / least["none"] for name in backgrounds[1:]}
        return {"processor_seconds": seconds, "ratios": ratios}

    yield Case(
        name=f"{candidates} peptides on {targets} targets, cpu",
        model=EMBEDDED_MODEL.name,
        shape={
            "device": "cpu",
            "dtype": "float32",
            "targets": targets,
            "target_residues": target_residues,
            "candidates": candidates,
            "candidate_residues": candidate_residues,
            "preset": DEFAULT_PRESET,
            "decoys": len(background_contexts("decoys", targets)[1]),
        },
        check=_check_candidates,
        measure=measure,
        targets=[Target(("ratios", name), at_most=1.25) for name in backgrounds[1:]],
    )


def position_cases(
    *,
    residues: int,
    full_positions: int,
    cached_positions: int,
    refreshes: Sequence[int] = REFRESHES,
) -> Iterator[Case]:
    """Masked marginals of one protein in the three arms; arguments as for `candidate_cases`."""
    turbo = embedded()
    [protein] = _proteins([residues])
    ids = [turbo.codes.cls, *turbo.codes.encode(protein, "protein"), turbo.codes.eos]
    arms = {"frozen": "exact", "turbo": DEFAULT_PRESET}

    def variants(count: int) -> list[str]:
        """One variant at each of several positions spread over the protein."""
        return _variants(protein, [index * residues // count for index in range(count)])

    def measure(repeats: int) -> Figures:
        caches = {arm: prefill_ids(turbo, ids, arm) for arm in arms}
        parts = {"full": [partial(score_variants, turbo, protein, variants(full_positions), arm="full")]}
        for arm, cache in caches.items():
            parts[f"context {arm}"] = [partial(prefill_ids, turbo, ids, arm)]
            for refresh in refreshes:
                call = partial(score_variants, turbo, cache, variants(cached_positions), refresh=refresh)
                parts[f"{arm}, {refresh} refreshed"] = [call]
        seconds = spread(interleave(parts, repeats))
        full = residues * seconds["full"]["p50"] / full_positions
        whole = {"full": full}
        for arm, times in seconds.items():
            if "refreshed" in arm:
                context = seconds[f"context {arm.partition(',')[0]}"]["p50"]
                whole[arm] = context + residues * times["p50"] / cached_positions
        ratios = {f"full / {arm}": full / time for arm, time in whole.items() if arm != "full"}
        return {"seconds": seconds, "seconds_for_all_positions": whole, "ratios": ratios}

    yield Case(
        name=f"all positions of {residues}",
        model=EMBEDDED_MODEL.name,
        shape={
            "device": "cpu",
            "dtype": "float32",
            "residues": residues,
            "full_positions": full_positions,
            "cached_positions": cached_positions,
            "presets": arms,
        },
        check=_check_positions,
        measure=measure,
    )


def plain_scores(turbo: TurboEsm, target: str, candidate: str) -> list[float]:
    """Log-probabilities of a candidate's residues by Hugging Face's model, one masked copy at a time."""
    ids = [turbo.codes.cls, *turbo.codes.encode(target + candidate, "both"), turbo.codes.eos]
    found = []
    for at in range(1 + len(target), len(ids) - 1):
        masked = torch.tensor([ids])
        masked[0, at] = turbo.codes.mask
        with torch.no_grad():
            found.append(float(plain_model()(masked).logits[0, at].log_softmax(0)[ids[at]]))
    return found


def _check_candidates() -> Check:
    turbo, slow = embedded(), _slow()
    target, candidate = _proteins([_CHECKED_RESIDUES, 6], seed=1)
    full = turbo.score(target, candidate, arm="full").scores[0].log_probabilities
    errors = [_largest(full, plain_scores(turbo, target, candidate))]
    for arm in ("frozen", "turbo"):
        ours, expected = (_log_probabilities(one.score(target, candidate, arm=arm)) for one in (turbo, slow))
        errors.append(_largest(ours, expected))
    what = "log-probabilities: full against Hugging Face's model, cached against backend reference; largest difference"
    return Check(what, worst(errors), _TOLERANCE)


def _check_positions() -> Check:
    turbo, slow = embedded(), _slow()
    [protein] = _proteins([_CHECKED_RESIDUES], seed=1)
    variants = _variants(protein, (0, 30, 59))
    errors = []
    for arm in ("frozen", "turbo"):
        ours, expected = (one.score_variants(protein, variants, arm=arm).values for one in (turbo, slow))
        errors.append(_largest(ours, expected))
    what = "scores of cached arms against backend reference, largest difference"
    return Check(what, worst(errors), _TOLERANCE)


@functools.cache
def _slow() -> TurboEsm:
    """The embedded model with the slow reference of the fast paths."""
    return TurboEsm.from_pretrained(device="cpu", backend="reference")


def _variants(protein: str, places: Sequence[int]) -> list[str]:
    """A variant at each place: alanine, or tryptophan in its place."""
    return [f"{protein[place]}{place + 1}{'W' if protein[place] == 'A' else 'A'}" for place in places]


def _proteins(lengths: Sequence[int], seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(STANDARD_RESIDUES), length)) for length in lengths]


def _log_probabilities(scores: Scores) -> list[float]:
    return [value for one in scores.scores for value in one.log_probabilities]


def _largest(ours: Sequence[float], expected: Sequence[float]) -> float:
    return float(np.abs(np.array(ours) - np.array(expected)).max())
