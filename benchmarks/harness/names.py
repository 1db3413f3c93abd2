"""Names of arms and figures in result rows: benchmarks write them, reports look them up."""

from __future__ import annotations

from typing import Any

from esm_turbo.config import DEFAULT_PRESET, DEFAULT_REFRESH, PRODUCT_PRESETS

COMPRESSED = tuple(preset for preset in PRODUCT_PRESETS if preset != "exact")

# Attention on a CUDA device.
LAYER = "maps and bits of a layer of esm2-mini, random codes"
"""The model that rows of attention alone name."""
SDPA = "SDPA bf16"

# Embeddings.
SAME_BATCHES, FILE_ORDER, EMBED = "plain loop, same batches", "plain loop, file order, batches of 8", "turbo.embed"

# Precision of products.
BF16, FP8 = "bfloat16", "fp8"
"""No product in eight bits, and all."""

# Scoring and variant effects.
SCREENS = (20, 100, 1000)
"""Numbers of candidates that share one context."""
REFRESHES = (0, 2, 4, 8, 16, 32)
SCREENED_PRESETS = ("turbo3", "turbo2", "turbo1")

Arms = dict[str, tuple[str, dict[str, Any]]]
"""Preset and options of a method of `TurboEsm`, by arm."""


def screening_arms() -> Arms:
    """Options of `score` for every arm that is compared with `full`."""
    arms: Arms = {}
    for place in ("masked", "empty"):
        for refresh in REFRESHES:
            options = {"arm": "frozen", "place": place, "refresh": refresh}
            arms[f"frozen, {place}, {refresh}"] = (DEFAULT_PRESET, options)
    for preset in SCREENED_PRESETS:
        for refresh in REFRESHES if preset == DEFAULT_PRESET else (DEFAULT_REFRESH,):
            options = {"arm": "turbo", "place": "masked", "refresh": refresh}
            arms[f"{preset}, masked, {refresh}"] = (preset, options)
    return arms


def variant_arms() -> Arms:
    """Options of `score_variants` for every arm."""
    arms: Arms = {
        "full, masked": (DEFAULT_PRESET, {"arm": "full"}),
        "full, wild_type": (DEFAULT_PRESET, {"arm": "full", "method": "wild_type"}),
        "frozen, wild_type": (DEFAULT_PRESET, {"arm": "frozen", "method": "wild_type"}),
    }
    for refresh in REFRESHES:
        arms[f"frozen, masked, {refresh}"] = (DEFAULT_PRESET, {"arm": "frozen", "refresh": refresh})
    for preset in SCREENED_PRESETS:
        arms[f"{preset}, wild_type"] = (preset, {"arm": "turbo", "method": "wild_type"})
        for refresh in REFRESHES if preset == DEFAULT_PRESET else (DEFAULT_REFRESH,):
            arms[f"{preset}, masked, {refresh}"] = (preset, {"arm": "turbo", "refresh": refresh})
    return arms


E1_OURS, E1_PREFILL, E1_REFERENCE = "prefill and all positions", "prefill", "E1Predictor"
"""Arms of the benchmark of E1: a context and all positions after it, the context alone, and E1's own code."""
