"""Names of arms and figures in result rows: benchmarks write them, reports look them up."""

from __future__ import annotations

from typing import Any

from esm_turbo.config import DEFAULT_PRESET, DEFAULT_REFRESH, PRODUCT_PRESETS

COMPRESSED = tuple(preset for preset in PRODUCT_PRESETS if preset != "exact")

# Attention on a CUDA device.
LAYER = "maps and bits of a layer of esm2-mini, random codes"
"""What rows of attention alone name as their model."""
SDPA, SDPA_FLOAT32 = "SDPA bf16", "SDPA fp32"
PAPER_KERNEL = "one program a head, table in memory"
EMPTY = "two empty launches"
BARE = "reads and writes"
"""Of attention over packed contexts, without its arithmetic."""

# Caches of other packages.
AITHER, QUANTO, HQQ = "aither-kvcache, 4 bits", "transformers on optimum-quanto, 4 bits", "transformers on HQQ, 4 bits"
PACKAGES = {AITHER: "aither-kvcache", QUANTO: "optimum-quanto", HQQ: "hqq"}
PEER_SDPA = "SDPA bf16, FlashAttention"
PEER_PRESETS = ("turbo4", "turbo3")

# Embeddings.
SAME_BATCHES, FILE_ORDER, EMBED = "plain loop, same batches", "plain loop, file order, batches of 8", "turbo.embed"

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


# Counters of NVIDIA's ncu.
_PART = ".avg.pct_of_peak_sustained_elapsed"
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = {
    "microseconds": "gpu__time_duration.sum",
    "programs": "launch__grid_size",
    "registers": "launch__registers_per_thread",
    "warp instructions": "smsp__inst_executed.sum",
    "warps of a scheduler": "smsp__warps_active.avg.per_cycle_active",
    "memory, GB/s": "dram__bytes_read.sum.per_second",
    "memory, %": f"gpu__dram_throughput{_PART}",
    "second-level cache, %": f"lts__throughput{_PART}",
    "first-level cache's data, %": f"l1tex__data_pipe_lsu_wavefronts{_PART}",
    "of this for shared memory, %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "instructions issued, %": f"sm__issue_active{_PART}",
    "integer and logic, %": f"sm__pipe_alu_cycles_active{_PART}",
    "tensor cores, %": f"sm__pipe_tensor_cycles_active{_PART}",
    "cycles of an instruction": "smsp__average_warps_active_per_inst_executed.ratio",
    "of these waiting for memory": _STALLED.format("long_scoreboard"),
    "of these waiting for results": _STALLED.format("wait"),
    "of these waiting for shared memory": _STALLED.format("short_scoreboard"),
}
"""Names in the rows, and those of ncu."""
