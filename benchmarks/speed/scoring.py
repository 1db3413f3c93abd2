"""Candidates per second: recomputed with their target for every mask, and as extensions of the target's cached context.

The extension by a candidate and the context of the target are timed separately, and combined for screens of 20, 100 and
1,000 candidates of the same length, which share the context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.harness.embedded import embedded, plain_model
from benchmarks.harness.measure import Case, Check, Figures, Target, timed, worst
from benchmarks.harness.models import random_sequences
from benchmarks.harness.names import REFRESHES, SCREENS
from esm_turbo import TurboEsm, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET, DEFAULT_REFRESH
from esm_turbo.tasks.common.forwards import prefill_ids
from esm_turbo.tasks.variants.many import score_variants

_CPU = {"device": "cpu", "dtype": "float32"}
_ARMS = {"frozen": "exact", "turbo": DEFAULT_PRESET}
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
    target, *candidates = random_sequences([target_residues, *[candidate_residues] * cached_candidates])
    ids = [turbo.codes.cls, *turbo.codes.encode(target, "target")]

    def measure(repeats: int) -> Figures:
        seconds, cached = _timed_arms(
            ids,
            partial(turbo.score, target, candidates[:full_candidates], arm="full"),
            lambda cache, refresh: turbo.score(cache, candidates, refresh=refresh),
            refreshes,
            repeats,
        )
        full = seconds["full"]["p50"] / full_candidates
        rates, ratios = {"full": 1 / full}, {}
        for arm, (context, extension) in cached.items():
            for screen in SCREENS:
                rate = screen / (context + screen * extension / cached_candidates)
                rates[f"{arm}, {screen} candidates"] = rate
                ratios[f"{arm}, {screen} candidates / full"] = full * rate
        return {"seconds": seconds, "candidates_per_second": rates, "ratios": ratios}

    yield Case(
        name=f"{candidate_residues} residues on {target_residues}, cpu",
        model=EMBEDDED_MODEL.name,
        shape={
            **_CPU,
            "target_residues": target_residues,
            "candidate_residues": candidate_residues,
            "full_candidates": full_candidates,
            "cached_candidates": cached_candidates,
            "presets": _ARMS,
        },
        check=_check_candidates,
        measure=measure,
        targets=[Target(("ratios", f"turbo, {DEFAULT_REFRESH} refreshed, 1000 candidates / full"), at_least=at_least)],
    )


def position_cases(
    *, residues: int, full_positions: int, cached_positions: int, refreshes: Sequence[int] = REFRESHES
) -> Iterator[Case]:
    """Masked marginals of one protein in the three arms; arguments as for `candidate_cases`."""
    turbo = embedded()
    [protein] = random_sequences([residues])
    ids = [turbo.codes.cls, *turbo.codes.encode(protein, "protein"), turbo.codes.eos]

    def variants(count: int) -> list[str]:
        """One variant at each of several positions spread over the protein."""
        return _variants(protein, [index * residues // count for index in range(count)])

    def measure(repeats: int) -> Figures:
        seconds, cached = _timed_arms(
            ids,
            partial(score_variants, turbo, protein, variants(full_positions), arm="full"),
            lambda cache, refresh: score_variants(turbo, cache, variants(cached_positions), refresh=refresh),
            refreshes,
            repeats,
        )
        whole = {"full": residues * seconds["full"]["p50"] / full_positions}
        for arm, (context, extension) in cached.items():
            whole[arm] = context + residues * extension / cached_positions
        ratios = {f"full / {arm}": whole["full"] / whole[arm] for arm in cached}
        return {"seconds": seconds, "seconds_for_all_positions": whole, "ratios": ratios}

    yield Case(
        name=f"all positions of {residues}",
        model=EMBEDDED_MODEL.name,
        shape={
            **_CPU,
            "residues": residues,
            "full_positions": full_positions,
            "cached_positions": cached_positions,
            "presets": _ARMS,
        },
        check=_check_positions,
        measure=measure,
    )


def _timed_arms(
    ids: Sequence[int],
    full: Callable[[], object],
    extend: Callable[[TurboKVCache, int], object],
    refreshes: Sequence[int],
    repeats: int,
) -> tuple[Figures, dict[str, tuple[float, float]]]:
    """Time a call without a cache, and contexts and their extensions in the cached arms.

    Args:
        ids: tokens of the context.
        full: the call without a cache.
        extend: extends a context, with so many residues refreshed.
        refreshes: numbers of residues.
        repeats: of each.

    Returns:
        Seconds of all; and by cached arm and residues refreshed those of the context and of the extension.
    """
    turbo, calls = embedded(), {"full": full}
    for arm in _ARMS:
        calls[f"context {arm}"] = partial(prefill_ids, turbo, ids, arm)
        cache = prefill_ids(turbo, ids, arm)
        calls |= {f"{arm}, {refresh} refreshed": partial(extend, cache, refresh) for refresh in refreshes}
    seconds = timed(calls, repeats)
    medians = {name: times["p50"] for name, times in seconds.items()}
    return seconds, {
        name: (medians[f"context {name.partition(',')[0]}"], medians[name]) for name in calls if "refreshed" in name
    }


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
    """Compare the arm `full` with Hugging Face's model, and the cached ones with the slow reference."""
    turbo, slow = embedded(), _slow()
    target, candidate = random_sequences([_CHECKED_RESIDUES, 6], seed=1)

    def scored(model: TurboEsm, arm: str) -> list[float]:
        return [x for one in model.score(target, candidate, arm=arm).scores for x in one.log_probabilities]

    errors = [_largest(scored(turbo, "full"), plain_scores(turbo, target, candidate))]
    errors += [_largest(scored(turbo, arm), scored(slow, arm)) for arm in _ARMS]
    what = "log-probabilities: full against Hugging Face's model, cached against backend reference; largest difference"
    return Check(what, worst(errors), _TOLERANCE)


def _check_positions() -> Check:
    """Compare the cached arms with the slow reference."""
    turbo, slow = embedded(), _slow()
    [protein] = random_sequences([_CHECKED_RESIDUES], seed=1)
    variants = _variants(protein, (0, 30, 59))
    errors = []
    for arm in _ARMS:
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


def _largest(ours: Sequence[float], expected: Sequence[float]) -> float:
    return worst(abs(one - other) for one, other in zip(ours, expected, strict=True))
