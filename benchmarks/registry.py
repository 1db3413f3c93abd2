"""All benchmarks of speed and memory and all experiments on accuracy by name, with their shapes and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from benchmarks.accuracy import (
    calibration_sets,
    components,
    fp8,
    homologs,
    long_proteins,
    presets,
    screening,
    sizes,
    specificity,
    variant_effects,
)
from benchmarks.cuda import calls, cold_start, decode_attention, whole_forwards
from benchmarks.cuda import fp8 as fp8_calls
from benchmarks.harness.measure import Case
from benchmarks.harness.models import Architecture
from benchmarks.speed import calibration, context_store, e1, embedding, identity, scoring, short_contexts
from esm_turbo.config import COMPARISON_PRESETS, PRODUCT_PRESETS
from esm_turbo.tasks.embedding.windows import Windows

ESM2_650M = Architecture("650M, random weights")
ESM2_650M_CUT = Architecture("650M cut to 4 layers, random weights", num_layers=4)
ESM2_3B = Architecture("3B, random weights", num_layers=36, num_heads=40, intermediate_size=10240)
ESM2_15B = Architecture("15B, random weights", num_layers=48, num_heads=40, head_dim=128, intermediate_size=20480)


@dataclass(frozen=True)
class Benchmark:
    """A named group of rows about time or memory.

    Attributes:
        summary: for --help.
        cases: its cases; a function, so that nothing is built before its turn.
        most_repeats: upper limit of the repeats; None for no limit.
    """

    summary: str
    cases: Callable[[], Iterable[Case]]
    most_repeats: int | None = None


@dataclass(frozen=True)
class Experiment:
    """A named group of rows about accuracy or sizes.

    Attributes:
        summary: for --help.
        cases: its cases, given the maximum number of proteins per set, None for all.
        kind: of its records; empty for its name.
    """

    summary: str
    cases: Callable[[int | None], Iterable[Case]]
    kind: str = ""


BENCHMARKS: dict[str, Benchmark] = {
    "scoring_12_on_500": Benchmark(
        "candidates of 12 residues per second on a target of 500, recomputed and cached, embedded model",
        partial(
            scoring.candidate_cases,
            target_residues=500,
            candidate_residues=12,
            full_candidates=2,
            cached_candidates=8,
            at_least=10.0,
        ),
    ),
    "variant_positions": Benchmark(
        "masked marginals of all positions of a protein of 263, recomputed and cached, embedded model",
        partial(scoring.position_cases, residues=263, full_positions=32, cached_positions=263),
    ),
    "long_proteins": Benchmark(
        "peak memory and speed at 5,000 and 35,000 residues, in windows",
        partial(long_proteins.process_cases, Windows(511, 64, 511), residues=(5000, 35_000)),
    ),
    "embedding_throughput": Benchmark(
        "embeddings of shipped proteins, compared with plain loops over Hugging Face's model",
        lambda: chain(
            embedding.embedded_cases(proteins=24),
            embedding.random_cases(ESM2_650M_CUT, proteins=8),
        ),
    ),
    "calibration": Benchmark(
        "a calibration of the embedded model, phase by phase, and its presets fitted one by one",
        # The share of 117 MiB in the 650M geometry: 48 of 660 heads.
        partial(calibration.embedded_cases, proteins=64, mib=8.6),
        most_repeats=3,
    ),
    "e1": Benchmark(
        "all masked positions of a protein after homologs, by the small model of E1 and by its reference code",
        e1.small_cases,
        most_repeats=3,
    ),
    "short_contexts": Benchmark(
        "12-mers after contexts of 20 to 500 residues: recomputed, and from a cache with its prefill",
        partial(short_contexts.cases, (20, 50, 100, 200, 500), candidates=16, candidate_residues=12, refresh=8),
    ),
    "store_read": Benchmark(
        "reading a context from a store, compared with its prefill",
        lambda: chain(
            context_store.embedded_cases((165, 512, 1022), "turbo3"),
            context_store.random_cases(ESM2_650M_CUT, (165, 512), "turbo3"),
        ),
    ),
    "identity": Benchmark(
        "cost of recognising a model: opening a store, looking for changes, calls with and without it",
        partial(identity.cases, ESM2_650M, 512, 12, "cpu", torch.float32, calls=2, at_most=1.05),
        most_repeats=5,
    ),
}

_CONTEXTS = (512, 1024, 4096, 16384)
_ATTENTION_SHAPES: tuple[decode_attention.Shape, ...] = (
    *((rows, tokens, 1) for rows in (64, 1, 8) for tokens in _CONTEXTS),
    (64, 4096, 16),
)
# Targets of the kernels, by shape.
_ATTENTION_TARGETS: dict[decode_attention.Shape, dict[str, float]] = {
    (64, 4096, 1): {"SDPA bf16 / turbo4": 2.8, "SDPA bf16 / turbo3": 3.2, "SDPA bf16 / turbo2": 4.0},
    (64, 1024, 1): {"SDPA bf16 / turbo4": 2.2, "SDPA bf16 / turbo2": 3.0},
    (1, 1024, 1): {"SDPA bf16 / turbo3": 1 / 0.65},
    (64, 4096, 16): {"SDPA bf16 / turbo4": 2.5},
}
GPU_BENCHMARKS: dict[str, Benchmark] = {
    "decode_attention_cuda": Benchmark(
        "attention over packed contexts, compared with SDPA",
        partial(decode_attention.attention_cases, _ATTENTION_SHAPES, _ATTENTION_TARGETS),
        most_repeats=20,
    ),
    "calls_cuda": Benchmark(
        "calls of the public API, from strings to results",
        partial(calls.call_cases, ESM2_650M, 500, 400, 16384, 1000, 20),
        most_repeats=5,
    ),
    "cold_start_cuda": Benchmark(
        "everyday calls in a fresh process without compiled kernels",
        partial(cold_start.cold_cases, ESM2_650M, 24, 30.0),
        most_repeats=1,
    ),
    "store_read_cuda": Benchmark(
        "reading a context from a store, compared with its prefill, all layers of 650M",
        partial(context_store.random_cases, ESM2_650M, (165, 512, 1022), "turbo3", "cuda"),
        most_repeats=9,
    ),
    "identity_cuda": Benchmark(
        "cost of recognising a model: opening a store, looking for changes, captured calls with and without it",
        partial(identity.cases, ESM2_650M, 1024, 12, "cuda", torch.bfloat16, calls=20, at_most=1.02),
        most_repeats=15,
    ),
    "e1_cuda": Benchmark(
        "all masked positions of a protein after homologs in the geometry of E1 600M, and by its reference code",
        e1.random_cases,
        most_repeats=3,
    ),
    "whole_forwards_cuda": Benchmark(
        "embedding and prefill of whole proteins, compared with Hugging Face's model eager, compiled and unpadded",
        partial(whole_forwards.cases, ESM2_650M),
        most_repeats=5,
    ),
    "fp8_cuda": Benchmark(
        "calls with eight-bit products, compared with bfloat16, in the 650M, 15B and ESM-C 6B geometries",
        partial(
            fp8_calls.cases,
            [
                fp8_calls.Geometry(
                    ESM2_650M.name,
                    fp8_calls.esm2(ESM2_650M),
                    "esm2-mini",
                    proteins=400,
                    peptides=1000,
                    speedups={"embedding": 1.38, "score": 1.4},
                ),
                fp8_calls.Geometry(
                    "ESM-C 6B, random weights",
                    fp8_calls.esmc_6b,
                    "esmc-mini",
                    proteins=60,
                    peptides=256,
                    speedups={"embedding": 1.65, "score": 1.62},
                ),
                fp8_calls.Geometry(
                    ESM2_15B.name,
                    fp8_calls.esm2(ESM2_15B),
                    "esm2-mini",
                    proteins=40,
                    peptides=128,
                    speedups={"embedding": 1.6},
                ),
            ],
        ),
        most_repeats=5,
    ),
    "calibration_cuda": Benchmark(
        "a calibration on the shipped proteins, phase by phase, in the 650M, 3B and ESM-C 6B geometries",
        lambda: chain(
            calibration.random_cases(ESM2_650M, warm=15.0, first=30.0, mib=120.0),
            calibration.random_cases(ESM2_3B, warm=30.0, first=60.0, mib=None),
            calibration.esmc_cases(warm=90.0, first=90.0),
        ),
        most_repeats=3,
    ),
}
"""Benchmarks that need a CUDA device, the most important first; without a device they have no rows."""

TIMED = BENCHMARKS | GPU_BENCHMARKS

EXPERIMENTS: dict[str, Experiment] = {
    "accuracy": Experiment(
        "accuracy and memory of the package's presets on CATH domains and long proteins",
        lambda limit: presets.preset_cases(PRODUCT_PRESETS, max_proteins=limit),
    ),
    "accuracy_codecs": Experiment(
        "the same for the codecs of other papers and packages, leave-one-out alone",
        lambda limit: presets.codec_cases(COMPARISON_PRESETS, max_proteins=limit),
        "accuracy",
    ),
    "families": Experiment(
        "the same for the package's presets with the small model of ESM-C",
        lambda limit: presets.preset_cases(PRODUCT_PRESETS, max_proteins=limit, model="esmc-mini"),
    ),
    "homologs": Experiment(
        "perplexity and accuracy of the package's presets after homologs, with the small model of E1",
        lambda limit: homologs.cases(max_families=limit),
    ),
    "frozen_queries": Experiment(
        "scores of variants after homologs whose protein is frozen, against those of the whole protein",
        lambda limit: homologs.frozen_query_cases(max_families=limit),
    ),
    "windows": Experiment(
        "long proteins in windows against the full run, by window, memory and preset",
        lambda limit: long_proteins.accuracy_cases(
            [Windows(window, 64, memory) for window in (256, 512) for memory in (0, 256, 512, 1024)],
            ("exact", "turbo3"),
            max_proteins=limit,
        ),
    ),
    "screening": Experiment(
        "rankings of peptides on 92 targets by the cached arms against the full arm, by residues refreshed",
        lambda limit: screening.cases(max_proteins=limit),
    ),
    "specificity": Experiment(
        "ranks of true binders by likelihood and by specificity, every peptide on every target",
        lambda limit: specificity.cases(max_proteins=limit),
    ),
    "variants": Experiment(
        "variant effects by all arms against measured fitness, and leakage of residues from a cached protein",
        lambda limit: variant_effects.cases(max_proteins=limit),
    ),
    "calibration_size": Experiment(
        "accuracy by the number of proteins of a calibration",
        lambda limit: calibration_sets.size_cases(max_proteins=limit),
    ),
    "fp8": Experiment(
        "what eight-bit products cost the small models of ESM-2 and ESM-C, by share of the products",
        lambda limit: fp8.cases(max_proteins=limit),
    ),
    "peer_outliers": Experiment(
        "codecs where channels are outliers",
        lambda limit: components.cases(max_proteins=limit),
    ),
    "memory": Experiment(
        "bytes of caches in the published geometries",
        lambda limit: sizes.memory_cases(),
    ),
}
"""Each writes records of one kind, stored in the file of that name in benchmarks/results/."""
