"""Tables of docs/performance.md: what was measured on a CUDA device, what was asked for, and the paper's claims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import (
    BARE,
    COMPRESSED,
    COUNTERS,
    EMPTY,
    LAYER,
    PACKAGES,
    PAPER_KERNEL,
    PEER_PRESETS,
    PEER_SDPA,
    REFRESHES,
    SCREENS,
    SDPA,
    SDPA_FLOAT32,
)
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import small, table

FILE = "gpu"
NOT_MEASURED = "Not measured yet: `python -m benchmarks.run gpu --save` on a machine with a CUDA device.\n"

PAPER_PREFILL = {32: (31, 57), 143: (77, 104), 165: (82, 103)}
"""Table 5: milliseconds without and with a cache, by tokens."""
PAPER_MEMORY = {"float32": 330.0, "paper": 46.6}
"""Table 4: megabytes of a cache of 1,024 tokens."""
PAPER_FETCH = (1.19, 0.61, 1.96)
"""Table 6: milliseconds of fetching keys from a context of 143 tokens by PyTorch and by the kernel, and the ratio."""

_MIB = 2**20
_PREFILL_HEAD = (
    "tokens, preset", "eager, ms", "encoding alone, eager, ms", "captured, ms", "encoding alone, captured, ms",
    "share of the forward",
)  # fmt: skip
_PREFILL_SAID = "milliseconds without -> with a cache (overhead); all layers, batch of one, bfloat16"
# What rows name as their model, where a reader needs more words.
_IN_WORDS = {LAYER: "the transforms and bit widths of one esm2-mini layer and random codes"}


def gpu_attention() -> str:
    """Microseconds of decode attention by shape, and how many times as fast as SDPA."""
    rows = []
    records = _records("decode_attention_cuda")
    for record in records:
        figures = record["figures"]
        shape, seconds = figures["shape"], figures["seconds"]
        rows.append(
            [
                _decoding(shape),
                f"{_us(seconds, SDPA)} ({figures['SDPA bf16 backend'].partition('_')[0].lower()})",
                _us(seconds, SDPA_FLOAT32),
                *(f"{_us(seconds, p)}{_times(figures, f'{SDPA} / {p}')}" for p in _SHOWN),
                _us(seconds, PAPER_KERNEL),
                _us(seconds, EMPTY),
            ]
        )
    head = ["batch x context, queries", "SDPA bf16 (backend)", "SDPA fp32", *(f"`{p}`" for p in _SHOWN),
            "paper's kernel structure", EMPTY]  # fmt: skip
    return table(head, rows) + _source(records, "microseconds (speedup over SDPA bf16); 20 heads of 64, bfloat16")


def gpu_bare_reads() -> str:
    """Microseconds of attention of one query beside those of its launches, reads and writes alone."""
    rows = []
    records = _records("bare_reads_cuda")
    for record in records:
        figures = record["figures"]
        seconds, ratios = figures["seconds"], figures["ratios"]
        for name in (name for name in ratios if name.startswith(f"{SDPA} / {BARE} of ")):
            bare = name.removeprefix(f"{SDPA} / ")
            preset = bare.removeprefix(f"{BARE} of ")
            rows.append(
                [
                    _decoding(figures["shape"]),
                    f"`{preset}`",
                    _us(seconds, SDPA),
                    f"{_us(seconds, preset)}{_times(figures, f'{SDPA} / {preset}')}",
                    f"{_us(seconds, bare)}{_times(figures, name)}",
                    _us(seconds, EMPTY),
                ]
            )
    head = ["batch x context, queries", "preset", "SDPA bf16", "attention", "its reads and writes alone", EMPTY]
    return table(head, rows) + _source(records, "microseconds (speedup over SDPA bf16); 20 heads of 64, bfloat16")


def gpu_overview() -> str:
    """How many times as fast as SDPA attention over compressed contexts is, for some shapes."""
    records = [r for r in _records("decode_attention_cuda") if _decoding(r["figures"]["shape"]) in _OVERVIEW]
    rows = [
        [_decoding(record["figures"]["shape"]), *(_ratio(record["figures"], f"{SDPA} / {preset}") for preset in _SHOWN)]
        for record in records
    ]
    said = "Speedup over the fastest backend of SDPA in bfloat16: one layer, 20 heads of 64, captured in a CUDA graph"
    return table(["batch x context, queries", *(f"`{preset}`" for preset in _SHOWN)], rows) + _source(records, said)


def gpu_profile() -> str:
    """Hardware counters of the kernel that reads contexts, a column a case."""
    records = list(stored.newest("gpu_profile", lambda figures: tuple(figures["cases"])).values())
    cases = {name: case for record in records for name, case in record["figures"]["cases"].items()}
    rows = [
        [_COUNTER_LABELS.get(counter, counter), *(_number(case.get(counter)) for case in cases.values())]
        for counter in COUNTERS
    ]
    head = ["ncu counter", *(_profiled(case) for case in cases)]
    return table(head, rows) + _source(records, "64 contexts of 4,096 tokens", "gpu_profile")


def gpu_bandwidth() -> str:
    """Bytes read a second beside the copy's."""
    rows = []
    records = _records("decode_attention_cuda")
    for record in records:
        shape, rates = record["figures"]["shape"], record["figures"]["GB/s"]
        rows.append(
            [
                _decoding(shape),
                f"{rates['copy']:,.0f}",
                *(f"{rates[arm]:,.0f} ({rates[arm] / rates['copy']:.2f})" for arm in (SDPA, *_SHOWN) if arm in rates),
            ]
        )
    head = ["batch x context, queries", "copy (read and write)", SDPA, *(f"`{p}`" for p in _SHOWN)]
    return table(head, rows) + _source(records, "GB/s of stored context read (fraction of the copy's)")


def gpu_in_cache() -> str:
    """The same of contexts that may still lie in the device's cache, and against the paper's kernel structure."""
    rows = []
    records = _records("decode_attention_cuda")
    for record in records:
        figures = record["figures"]
        shape, seconds = figures["shape"], figures["seconds in cache"]
        rows.append(
            [
                _decoding(shape),
                *(_us(seconds, arm) for arm in (SDPA, *_SHOWN)),
                *(_times(figures, f"{PAPER_KERNEL} / {p}").strip(" ()") for p in ("paper", "turbo3")),
            ]
        )
    head = ["batch x context, queries", SDPA, *(f"`{p}`" for p in _SHOWN), "paper's structure / `paper`, flushed",
            "paper's structure / `turbo3`, flushed"]  # fmt: skip
    return table(head, rows) + _source(records, "microseconds, cache of the device not flushed")


def gpu_calls() -> str:
    """Calls of the public API beside Hugging Face's model and the matrix products alone."""
    records, rows = _records("calls_cuda"), []
    for record in records:
        figures = record["figures"]
        rates, unit = figures["per_second"], figures["unit"]
        for arm in figures["seconds"]:
            speedup = figures["ratios"].get(f"Hugging Face's model / {arm}")
            rows.append([
                figures["case"],
                _call(arm),
                _ms(figures["seconds"], arm),
                f"{rates[arm]:,.0f} {unit}",
                "" if speedup is None else f"{speedup:.2f}x",
            ])  # fmt: skip
    head = ["call", "arm", "median, ms", "per second", "speedup over Hugging Face's model"]
    return table(head, rows) + _source(records, "bfloat16, wall time from strings to results")


def gpu_targets() -> str:
    """Everything that was asked for; of what was asked of many cases, the one furthest from it."""
    asked: dict[tuple[str, str, str], list[tuple[Record, dict[str, Any]]]] = {}
    for record in _newest(lambda benchmark: True):
        for target in record["figures"]["targets"]:
            bound = f"at most {_number(target['at_most'])}" if "at_most" in target else (
                f"at least {_number(target['at_least'])}")  # fmt: skip
            name = record["figures"]["benchmark"].removesuffix("_cuda").replace("_", " ")
            asked.setdefault((name, target["figure"], bound), []).append((record, target))
    if not asked:
        raise LookupError("no targets")
    rows, records = [], []
    for (name, figure, bound), judged in asked.items():
        shown = [max(judged, key=_distance)] if len(judged) > _MANY_CASES else judged
        for record, target in shown:
            of = f", worst of {len(judged)}" if len(shown) < len(judged) else ""
            where = f"{name}: {record['figures']['case']}{of}"
            rows.append([where, _figure(figure), bound, _number(target["found"]), "yes" if target["met"] else "**no**"])
            records.append(record)
    said = "ratios are of median times, of candidates per second (scoring) or of errors (validation)"
    return table(["benchmark", "figure", "target", "measured", "met"], rows) + _source(records, said)


def gpu_table_2() -> str:
    """Prefill similarity."""
    rows = []
    records = _records("prefill_similarity_cuda")
    for record in records:
        figures = record["figures"]
        hidden, logits = figures["hidden_states"], figures["logits"]
        rows.append(
            [
                f"{figures['shape']['tokens']}, {figures['shape']['dtype']}",
                "1.000000",
                f"{min(hidden['cosine_mean_by_layer']):.6f}",
                f"{hidden['cosine_min']:.6f}",
                _small(hidden["largest_difference"]),
                f"{logits['cosine_min']:.6f}",
            ]
        )
    head = ["tokens, dtype", "paper: cosine", "ours: lowest layer mean", "ours: lowest token of any layer",
            "largest difference", "logits: lowest token"]  # fmt: skip
    said = f"all {records[-1]['figures']['layers']} layers, preset `{records[-1]['figures']['shape']['preset']}`"
    return table(head, rows) + _source(records, said)


def gpu_table_3() -> str:
    """Kernel validation."""
    rows = []
    records = _records("kernel_validation_cuda")
    for record in records:
        figures = record["figures"]
        shape = figures["shape"]
        rows.append(
            [
                f"`{shape['preset']}`, {shape['dtype']}, {shape['new_tokens']}",
                f"{figures['layers']}/{figures['layers']}",
                f"{min(figures['cosine_means']):.6f}",
                f"{figures['cosine_min']:.6f}",
                _small(max(figures["absolute_errors"])),
                _small(max(figures["relative_errors"])),
                _small(max(figures["relative_errors_of_sdpa"])),
            ]
        )
    head = ["preset, dtype, queries", "layers", "lowest layer-mean cosine", "lowest cosine", "largest error",
            "relative to the largest output", "relative error of SDPA in this dtype"]  # fmt: skip
    claim = "reference: float64. The paper reports 33/33 layers, mean cosine 1.000000 and errors below 1e-6 in float32"
    said = f"context of {records[-1]['figures']['shape']['context_tokens']:,} tokens; {claim}"
    return table(head, rows) + _source(records, said)


def gpu_table_4() -> str:
    """Bytes of caches."""
    [record] = _records("cache_bytes_cuda")
    sizes, rows = record["figures"]["bytes"], []
    for name in ("float32", "float16", *(preset for preset in ("exact", *_SHOWN) if preset in sizes["stored"])):
        size = sizes["stored"][name]
        claim = f"{PAPER_MEMORY[name]:.1f} MB" if name in PAPER_MEMORY else ""
        bits = record["figures"]["bits_per_element"].get(name, {"float32": 32, "float16": 16}.get(name, 0))
        rows.append(
            [
                f"`{name}`" if name in sizes["allocated"] else name,
                claim,
                f"{size / _MIB:.1f}",
                f"{bits:.2f}",
                f"{sizes['stored']['float32'] / size:.1f}x",
                f"{sizes['stored']['float16'] / size:.1f}x",
            ]
        )
    head = ["stored as", "paper", "MiB", "bits per element", "vs float32", "vs fp16"]
    said = f"one context of {record['figures']['shape']['tokens']:,} tokens, model in bfloat16"
    return table(head, rows) + _source([record], said)


def gpu_table_5() -> str:
    """Prefill overhead."""
    records = _records("prefill_cuda")
    rows = []
    for record in records:
        n = record["figures"]["shape"]["tokens"]
        claim = "{} -> {} (+{})".format(*PAPER_PREFILL[n], PAPER_PREFILL[n][1] - PAPER_PREFILL[n][0]) \
            if n in PAPER_PREFILL else ""  # fmt: skip
        for preset in ("turbo3", "paper"):
            name, *cells = _prefill(record, preset)
            rows.append([name, claim if preset == "paper" else "", *cells])
    head = [_PREFILL_HEAD[0], "paper: ms", *_PREFILL_HEAD[1:]]
    return table(head, rows) + _source(records, _PREFILL_SAID)


def gpu_prefill_esmc() -> str:
    """Prefill overhead of ESM-C."""
    records = _records("prefill_esmc_600m_cuda")
    return table(_PREFILL_HEAD, [_prefill(record, "turbo3") for record in records]) + _source(records, _PREFILL_SAID)


def _prefill(record: Record, preset: str) -> list[str]:
    """The cells of a prefill, see `_PREFILL_HEAD`."""
    figures = record["figures"]
    seconds = figures["seconds"]
    cells = [f"{figures['shape']['tokens']:,}, `{preset}`"]
    for kind in ("eager", "captured"):
        both = [_ms(seconds, f"{arm}, {kind}") for arm in ("forward", f"prefill {preset}")]
        overhead = figures["overhead_seconds"].get(f"{preset}, {kind}")
        more = "" if overhead is None else f" ({1e3 * overhead:+.2f})"
        cells += [f"{both[0]} -> {both[1]}{more}", _ms(seconds, f"encode {preset}, {kind}")]
    part = figures["ratios"].get(f"encode {preset}, captured / forward")
    return [*cells, "" if part is None else f"{100 * part:.1f} %"]


def gpu_cold_start() -> str:
    """The first calls on a machine."""
    records = _records("cold_start_cuda")
    rows = []
    for record in records:
        figures = record["figures"]
        seconds, compilation = figures["seconds"], figures["compilation_seconds"]
        for arm, kernels in (("cold", f"{figures['kernels']} compiled"), ("warm", "all on disk")):
            rows.append([arm, kernels, f"{seconds[arm]['p50']:.1f}", f"{compilation[arm]:.1f}"])
    said = f"a fresh process on {records[-1]['figures']['cores']} cores, a single run each"
    return table(["process", "kernels", "all calls, s", "of which compiling, s"], rows) + _source(records, said)


def gpu_table_6() -> str:
    """Decode attention by PyTorch and by kernels."""
    rows = []
    records = _records("decode_path_cuda")
    for record in records:
        figures = record["figures"]
        n = figures["shape"]["context_tokens"]
        for preset in ("paper", "turbo3"):
            cells = [f"{n:,}, `{preset}`"]
            for kind in ("eager", "captured"):
                seconds = figures["seconds"]
                cells += [_ms(seconds, f"{preset}, {path}, {kind}") for path in ("PyTorch", "kernels")]
                cells.append(_times(figures, f"{preset}, PyTorch, {kind} / {preset}, kernels, {kind}").strip(" ()"))
            rows.append(cells)
    head = ["context, preset", "eager: PyTorch, ms", "kernels, ms", "speedup", "captured: PyTorch, ms", "kernels, ms",
            "speedup"]  # fmt: skip
    said = (
        "attention of one new token in all 33 layers, bfloat16. The paper times the fetch of keys alone, at 143 tokens:"
        f" {PAPER_FETCH[0]} ms -> {PAPER_FETCH[1]} ms, {PAPER_FETCH[2]}x"
    )
    return table(head, rows) + _source(records, said)


def gpu_extension() -> str:
    """Whole extensions."""
    rows = []
    records = _records(
        "extension_cuda",
        "extension_3b_cuda",
        "extension_15b_cut_cuda",
        "extension_esmc_600m_cuda",
        "extension_esmc_6b_cuda",
    )
    for record in records:
        figures = record["figures"]
        # A whole forward is not always faster when captured.
        medians = {arm: row["p50"] for arm, row in figures["seconds"].items()}
        recompute = min(x for arm, x in medians.items() if arm.startswith("recompute"))
        for kind in ("eager", "captured"):
            arms = ["recompute", "extend exact", "extend turbo3", "extend paper"]
            extend = medians.get(f"extend turbo3, {kind}")
            rows.append(
                [
                    f"{record['model']}",
                    f"{figures['shape']['new_tokens']} on {figures['shape']['context_tokens']:,}, {kind}",
                    *(_ms(figures["seconds"], f"{arm}, {kind}") for arm in arms),
                    "" if extend is None else f"{recompute / extend:.2f}x",
                ]
            )
    head = ["geometry", "new tokens on context", "recompute, ms", "`exact`", "`turbo3`", "`paper`",
            "speedup of `turbo3` over the faster recompute"]  # fmt: skip
    return table(head, rows) + _source(records, "milliseconds per step of the whole model, batch of one, bfloat16")


def gpu_memory() -> str:
    """Extra memory of an extension."""
    rows = []
    records = _records("extension_memory_cuda")
    for record in records:
        figures = record["figures"]
        sizes = figures["bytes"]
        for n, extra in sizes["extra"].items():
            part = figures["part_of_cache"][n]
            rows.append(
                [f"`{figures['shape']['preset']}`, {n}", f"{sizes['dense bfloat16'] / _MIB:,.0f}",
                 f"{sizes['packed'] / _MIB:,.0f}", f"{extra / _MIB:,.1f}", f"{100 * part:.2f} %"]
            )  # fmt: skip
    shape = records[-1]["figures"]["shape"]
    head = ["preset, new tokens per row", "dense bfloat16 cache, MiB", "packed, MiB", "extra peak, MiB",
            "share of the packed cache"]  # fmt: skip
    said = f"batch of {shape['batch_size']} x {shape['context_tokens']:,}, after a first extension"
    return table(head, rows) + _source(records, said)


def gpu_resident() -> str:
    """Contexts beside the model."""
    [record] = _records("resident_contexts_cuda")
    figures = record["figures"]
    shape, sizes = figures["shape"], figures["bytes"]
    rows = [
        ["contexts, each encoded from its own protein", f"{figures['contexts']:,}"],
        ["distinct token sequences among them", f"{figures['distinct_token_sequences']:,}"],
        ["bytes per context, stored", f"{sizes['of a context']:,.0f}"],
        ["bytes per context, allocated", f"{sizes['of a context, allocated']:,.0f}"],
        ["seconds for all", f"{figures['seconds_for_all']:.0f}"],
        ["stopped by", figures["stopped_by"]],
        ["largest difference when the first, a middle and the last batch are read again",
         _small(figures["read_again"]["largest_difference"])],
    ]  # fmt: skip
    if "contexts_extrapolated" in figures:
        rows.append(["contexts that would fit (extrapolated)", f"{figures['contexts_extrapolated']:,}"])
    said = (
        f"contexts of {shape['tokens']} tokens in `{shape['preset']}` on a device of {sizes['device'] / 2**30:.0f} GiB"
    )
    return table(["quantity", "value"], rows) + _source([record], said)


def gpu_peers() -> str:
    """Other packages on the same shapes."""
    rows: list[list[str]] = []
    failed: dict[str, str] = {}
    records = _records("peers_cuda")
    for record in records:
        figures = record["figures"]
        failed |= {name: why for name, why in figures["failed"].items() if name in PACKAGES}
        shape = figures["shape"]
        for kind in ("captured", "eager"):
            rows.append(
                [
                    f"{shape['batch_size']} x {shape['context_tokens']:,}, {kind}",
                    *(_us(figures["seconds"], f"{arm}, {kind}") for arm in (PEER_SDPA, *PEER_PRESETS, *PACKAGES)),
                ]
            )
    versions = records[-1]["figures"]["shape"]["versions"]
    named = [f"{name} ({versions[PACKAGES[name]] or 'missing'})" for name in PACKAGES]
    head = ["batch x context", PEER_SDPA, *(f"`{p}`" for p in PEER_PRESETS), *named]
    said = "microseconds; one query, 20 heads of 64"
    reasons = "".join(f" {name} did not run: {why}." for name, why in failed.items())
    return table(head, rows) + _source(records, said + "." + reasons if reasons else said)


def gpu_scoring() -> str:
    """Candidates a second."""
    records, rows = _records("scoring_12_on_500_cuda"), []
    for record in records:
        figures = record["figures"]
        rates, dtype = figures["candidates_per_second"], figures["shape"]["dtype"]
        rows.append([f"`full`, {dtype}", *[f"{rates['full']:,.1f}"] * 3])
        for arm in ("frozen", "turbo"):
            for refresh in REFRESHES:
                names = [f"{arm}, {refresh} refreshed, {screen} candidates" for screen in SCREENS]
                if names[0] not in rates:
                    continue
                cells = [f"{rates[name]:,.1f} ({figures['ratios'][f'{name} / full']:.1f}x)" for name in names]
                rows.append([f"`{arm}`, {dtype}, {refresh}", *cells])
    head = ["arm, dtype, residues refreshed", "20 candidates", "100", "1,000"]
    said = "candidates per second (speedup over `full`), 12 residues on a target of 500"
    return table(head, rows) + _source(records, said)


def gpu_tests() -> str:
    """What became of the tests that need a device, file by file."""
    records = list(stored.newest("gpu_tests", lambda figures: tuple(figures["by_file"])).values())
    files = {file: counts for record in records for file, counts in record["figures"]["by_file"].items()}
    rows = [[f"`{file}`", *(str(counts.get(outcome, 0)) for outcome in _OUTCOMES)] for file, counts in files.items()]
    total = sum(sum(counts.values()) for counts in files.values())
    return table(["tests", *_OUTCOMES.values()], rows) + _source(records, f"{total:,} tests marked `gpu`", "gpu_tests")


def _distance(judged: tuple[Record, dict[str, Any]]) -> float:
    """Larger the further a target is from being met, among those with one bound."""
    found = judged[1]["found"]
    if found is None:
        return math.inf
    return float(found if "at_most" in judged[1] else -found)


def _call(arm: str) -> str:
    """An arm with its call in code font."""
    call, comma, rest = arm.partition(",")
    return f"`{call}`{comma}{rest}" if call.startswith("turbo.") else arm


def _figure(name: str) -> str:
    """A target's figure in words: its stored name is a path into the record."""
    kind, _, rest = name.partition(" ")
    label = rest.replace(PAPER_KERNEL, "paper's kernel structure").removesuffix(" p50")
    return {
        "ratios": label,
        "seconds": f"{label}, median seconds",
        "residues_per_second": f"{label}, residues per second",
        "part_of_cache": f"share of the packed cache, {rest} new token{'s' * (rest != '1')}",
    }.get(kind, name)


def _profiled(case: str) -> str:
    """A profiled case in words."""
    for stored_as, label in _CASE_LABELS.items():
        case = case.replace(stored_as, label)
    return case


def _decoding(shape: dict[str, Any]) -> str:
    """Contexts and queries of a row of decode attention."""
    return f"{shape['batch_size']} x {shape['context_tokens']:,}, {shape['queries']}"


_OUTCOMES = {"passed": "passed", "failure": "failed", "error": "errors", "skipped": "skipped"}
_COUNTER_LABELS = {
    "registers": "registers per thread",
    "warps of a scheduler": "warps per scheduler",
    "memory, GB/s": "DRAM reads, GB/s",
    "memory, %": "DRAM throughput, %",
    "second-level cache, %": "L2 throughput, %",
    "first-level cache's data, %": "L1 data pipe, %",
    "of this for shared memory, %": "thereof shared memory, %",
    "instructions issued, %": "issue slots used, %",
    "integer and logic, %": "integer and logic pipe, %",
    "cycles of an instruction": "warp cycles per instruction",
    "of these waiting for memory": "thereof long scoreboard (memory)",
    "of these waiting for results": "thereof wait (fixed latency)",
    "of these waiting for shared memory": "thereof short scoreboard (shared memory)",
}
"""Labels of counters whose stored names are not the usual ones."""
_CASE_LABELS = {
    "nothing asked for ahead": "no prefetch",
    "two tiles asked for ahead": "two tiles prefetched",
    "two tiles asked for at a time": "two tiles per prefetch",
    "keys in order": "keys in storage order",
}
_MANY_CASES = 6
_OVERVIEW = ("1 x 1,024, 1", "1 x 16,384, 1", "64 x 1,024, 1", "64 x 4,096, 1", "64 x 16,384, 1", "64 x 4,096, 16")
_SHOWN = tuple(preset for preset in (*COMPRESSED[1:], COMPRESSED[0]))


def _or_not_measured(function: Callable[[], str]) -> Callable[[], str]:
    @functools.wraps(function)
    def made() -> str:
        try:
            return function()
        except LookupError:
            return NOT_MEASURED

    return made


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: _or_not_measured(function)
    for function in (
        gpu_overview, gpu_calls, gpu_targets, gpu_attention, gpu_bare_reads, gpu_bandwidth, gpu_in_cache, gpu_profile,
        gpu_table_2, gpu_table_3, gpu_table_4, gpu_table_5, gpu_table_6, gpu_prefill_esmc, gpu_cold_start,
        gpu_extension, gpu_memory, gpu_resident, gpu_peers, gpu_scoring, gpu_tests,
    )
}  # fmt: skip


def _records(*benchmarks: str) -> list[Record]:
    """The newest record of every case."""
    return _newest(lambda benchmark: benchmark in benchmarks)


def _newest(chosen: Callable[[str], bool]) -> list[Record]:
    return list(
        stored.newest(
            "speed", lambda f: (f["benchmark"], f["case"]) if chosen(f["benchmark"]) else None, FILE
        ).values()
    )  # fmt: skip


def _us(seconds: dict[str, Any], arm: str) -> str:
    return f"{1e6 * seconds[arm]['p50']:,.1f}" if arm in seconds else ""


def _ms(seconds: dict[str, Any], arm: str) -> str:
    return f"{1e3 * seconds[arm]['p50']:,.2f}" if arm in seconds else "–"


def _ratio(figures: dict[str, Any], name: str) -> str:
    found = figures["ratios"].get(name)
    return "" if found is None else f"{found:.2f}x"


def _times(figures: dict[str, Any], name: str) -> str:
    ratio = _ratio(figures, name)
    return f" ({ratio})" if ratio else ""


def _small(x: float) -> str:
    return f"{x:.1f}" if x >= 1 else f"{x:.1e}" if 0 < x < 1e-4 else small(x)


def _number(x: float | None) -> str:
    if x is None:
        return "not measured"
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _source(records: Sequence[Record], said: str, file: str = FILE) -> str:
    where, versions = records[-1]["environment"], records[-1]["environment"]["versions"]
    commits = dict.fromkeys(_commit(record["revision"]) for record in records)
    commit = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    models = "; ".join(dict.fromkeys(_IN_WORDS.get(name, name) for record in records if (name := record["model"])))
    text = said[0].upper() + said[1:].removesuffix(".")
    how = f"Measured with {models}, on" if models else "Run on"
    return (
        f"{text}. {how} {where['device_name']}, torch {versions['torch']}, triton"
        f" {versions.get('triton', 'missing')}, transformers {versions['transformers']}, {commit};"
        f" `benchmarks/results/{file}.jsonl`.\n"
    )


def _commit(revision: dict[str, Any] | None) -> str:
    return "not known" if revision is None else revision["commit"][:10] + (" with local changes" * revision["dirty"])
