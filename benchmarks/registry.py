"""The benchmarks by name: their shapes, and what each is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from benchmarks import calibration, extension, imports, prefill
from benchmarks.measure import Case
from benchmarks.models import Architecture

ESM2_650M = Architecture("650M, random weights")
ESM2_650M_CUT = Architecture("650M cut to 4 layers, random weights", num_layers=4)
ESM2_650M_TWO = Architecture("650M cut to 2 layers, random weights", num_layers=2)


@dataclass(frozen=True)
class Benchmark:
    """A named group of rows.

    Attributes:
        summary: what it answers.
        cases: its rows; a function, so that nothing is built before its turn.
    """

    summary: str
    cases: Callable[[], Iterable[Case]]


BENCHMARKS: dict[str, Benchmark] = {
    "extension_16_on_512": Benchmark(
        "16 new tokens on a context of 512 under every preset, and all 528 without a cache",
        partial(extension.speed_cases, ESM2_650M, context_tokens=512, new_tokens=16),
    ),
    "extension_16_on_512_cut": Benchmark(
        "the same in 4 layers: a quick look, whose weights fit no cache of the processor either",
        partial(extension.speed_cases, ESM2_650M_CUT, context_tokens=512, new_tokens=16),
    ),
    "extension_memory": Benchmark(
        "extra memory of an extension by the length of its context",
        partial(extension.memory_cases, ESM2_650M_TWO, context_tokens=(512, 2048, 8192), new_tokens=16),
    ),
    "calibration_cost": Benchmark(
        "partial_fit beside plain forwards, and memory by the number of proteins",
        lambda: chain(
            calibration.time_cases(proteins=24, toks_per_batch=(4096, 1024, 0)),
            calibration.memory_cases(proteins=(100, 1000), residues=100),
        ),
    ),
    "import_time": Benchmark("importing the package, the entry point, and the command's help", imports.cases),
    "prefill_overhead": Benchmark(
        "a forward that writes a cache beside one that does not",
        lambda: chain(
            prefill.embedded_cases(tokens=(165, 512)),
            prefill.random_cases(ESM2_650M_CUT, tokens=(165, 512)),
        ),
    ),
}
