"""Tables of docs/performance.md: what was measured on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import (
    BF16,
    COMPRESSED,
    E1_OURS,
    E1_PREFILL,
    E1_REFERENCE,
    EMBED,
    FP8,
    LAYER,
    SDPA,
)
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import made_by, table
from esm_turbo.config import DEFAULT_PRESET

# What rows name as their model, where a reader needs more words.
_IN_WORDS = {LAYER: "the transforms and bit widths of one esm2-mini layer and random codes"}


def gpu_attention(records: Sequence[Record]) -> str:
    """Speedup of attention over compressed contexts against SDPA, on all but the first device by the default preset."""
    by_device = _by_device(records)
    shape = "{batch_size} x {context_tokens:,}, {queries}"
    first, *others = (
        {shape.format(**figures["shape"]): figures for figures in (record["figures"] for record in found)}
        for found in by_device.values()
    )
    rows = []
    for name, figures in first.items():
        if name not in _LEFT_OUT:
            backend = figures["SDPA bf16 backend"].partition("_")[0].lower()
            rows.append([
                name,
                f"{1e6 * figures['seconds'][SDPA]['p50']:,.1f} ({backend})",
                *(_ratio(figures, f"{SDPA} / {preset}") for preset in _SHOWN),
                *(_ratio(of[name], f"{SDPA} / {DEFAULT_PRESET}") if name in of else "–" for of in others),
            ])  # fmt: skip
    more = [f"`{DEFAULT_PRESET}`, {device}" for device in list(by_device)[1:]]
    head = ["batch x context, queries", "SDPA bf16, µs (backend)", *(f"`{p}`" for p in _SHOWN), *more]
    said = "speedup over SDPA bf16; 20 heads of 64, captured in a CUDA graph"
    return table(head, rows) + _source(records, said)


def gpu_calls(records: Sequence[Record]) -> str:
    """Calls of the public API beside Hugging Face's model, on every device."""
    by_device = _by_device(records)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for device, of_device in by_device.items():
        for figures in (record["figures"] for record in of_device if record["figures"]["case"] not in _NOT_DEFAULT):
            for arm, rate in figures["per_second"].items():
                if arm == "matrix products alone" or arm.endswith("no graphs"):
                    continue
                speedup = _times(figures, f"Hugging Face's model / {arm}")
                cell = f"{rate:,.0f} {figures['unit']}{speedup}"
                rows.setdefault((figures["case"], _call(arm)), {})[device] = cell
    head = ["call", "arm", *(f"{device}, per second (speedup)" for device in by_device)]
    said = "Speedup over Hugging Face's model; bfloat16, wall time from strings to results"
    cells = [[*names, *(found.get(device, "–") for device in by_device)] for names, found in rows.items()]
    return table(head, cells) + _source(records, said)


def gpu_cold_start(records: Sequence[Record]) -> str:
    """The first calls on a machine."""
    rows = []
    for record in records:
        figures = record["figures"]
        where = f"{record['environment']['device_name']}, {figures['cores']} cores"
        seconds = (f"{figures['seconds'][arm]['p50']:.1f}" for arm in ("cold", "warm"))
        rows.append([where, str(figures["kernels"]), *seconds])
    head = ["on", "kernels", "all calls in a fresh process, kernels compiled, s", "kernels on disk, s"]
    return table(head, rows) + _source(records, "Single runs")


def gpu_e1(records: Sequence[Record]) -> str:
    """All masked positions of a protein after homologs, beside E1's reference code."""
    rows = []
    for record in records:
        figures = record["figures"]
        seconds = figures["seconds"]
        theirs = seconds.get(E1_REFERENCE)
        rows.append([
            figures["case"],
            f"{theirs['p50']:.2f}" if theirs else "not measured",
            f"{seconds[E1_OURS]['p50']:.2f}",
            f"{1e3 * seconds[E1_PREFILL]['p50']:,.0f}" if E1_PREFILL in seconds else "",
            f"{figures['ratios'][f'{E1_REFERENCE} / {E1_OURS}']:.1f}x" if theirs else "",
            f"{figures['context_bytes'] / 2**20:.0f}" if "context_bytes" in figures else "",
        ])  # fmt: skip
    head = ["context", f"`{E1_REFERENCE}`, s", "all positions, s", "of which prefill, ms", "speedup", "context, MiB"]
    shape = records[0]["figures"]["shape"]
    said = (
        f"a protein of {shape['residues']}, all positions masked, bfloat16, preset `{shape['preset']}`; the reference"
        " ran without its optional kernels"
    )
    return table(head, rows) + _source(records, said)


def gpu_fp8(records: Sequence[Record]) -> str:
    """Calls with all products in eight bits, in the geometries of three models."""
    rows: dict[str, list[str]] = {}
    models = []
    for record in records:
        figures = record["figures"]
        model, _, call = figures["case"].partition(": ")
        models.append(model)
        rate = f"{figures['per_second'][FP8]:,.0f} {figures['unit']}"
        rows.setdefault(call, []).append(f"{rate}{_times(figures, f'{BF16} / {FP8}')}")
    said = "per second (speedup over bfloat16); a context of 500, arms in turn, wall time from strings to results"
    head = ["call", *dict.fromkeys(models)]
    return table(head, [[call, *cells] for call, cells in rows.items()]) + _source(records, said)


def gpu_one_card(records: Sequence[Record]) -> str:
    """What fits beside the weights of a model on a card of 80 GB."""
    rows = []
    for record in {record["model"]: record for record in records}.values():
        figures = record["figures"]
        context, cells = figures["context_bytes"], []
        for arm in (BF16, FP8):
            weights = figures["weight_bytes"][arm]
            cells += [f"{weights / 1e9:.1f}", f"{(_CARD - weights) / context:,.0f}"]
        rows.append([record["model"], f"{context / 1e6:.1f}", *cells])
    head = ["model", "context, MB", "weights in bfloat16, GB", "contexts beside", "in fp8, GB", "contexts beside"]
    said = (
        "Weights and a context of 500 residues as measured; the contexts beside them follow, where 72 of a card's 80 GB"
        " serve weights and contexts, and 8 calls"
    )
    return table(head, rows) + _source(records, said)


def gpu_whole_forwards(records: Sequence[Record]) -> str:
    """Embedding and prefill of whole proteins, and every way in which Hugging Face's model runs."""
    found = [arm for record in records for arm in record["figures"]["per_second"]]
    arms = sorted(dict.fromkeys(found), key=lambda arm: (not arm.startswith("turbo."), arm != "eager", arm))
    rows = []
    for record in records:
        figures, rates = record["figures"], record["figures"]["per_second"]
        cells = (f"{rates[arm]:,.0f}{_times(figures, f'{arm} / {EMBED}')}" if arm in rates else "–" for arm in arms)
        rows.append([f"{figures['case']} tokens", *cells])
    head = ["proteins", *(f"`{arm}`" if arm.startswith("turbo.") else f"Hugging Face's, {arm}" for arm in arms)]
    said = "residues per second, padding not counted (how many times as fast `turbo.embed` is); means of residues"
    return table(head, rows) + _source(records, said)


def _call(arm: str) -> str:
    """An arm with its call in code font."""
    call, comma, rest = arm.partition(",")
    return f"`{call}`{comma}{rest}" if call.startswith("turbo.") else arm


_CARD = 72e9
# Shapes between others that are shown, or much like them.
_LEFT_OUT = ("64 x 512, 1", "1 x 4,096, 1", "8 x 1,024, 1", "8 x 4,096, 1", "8 x 16,384, 1")
# Calls with other batches than by default.
_NOT_DEFAULT = ("embedding, batches of 4096 tokens",)
_SHOWN = (*COMPRESSED[1:], COMPRESSED[0])
_SOURCES = {
    gpu_calls: "calls_cuda",
    gpu_attention: "decode_attention_cuda",
    gpu_cold_start: "cold_start_cuda",
    gpu_e1: "e1_cuda",
    gpu_fp8: "fp8_cuda",
    gpu_one_card: "fp8_cuda",
    gpu_whole_forwards: "whole_forwards_cuda",
}
# Tables of all devices; others are made once for each.
_TOGETHER = (gpu_attention, gpu_calls, gpu_cold_start)


def _made(make: Callable[[Sequence[Record]], str], benchmark: str) -> str:
    """The table, or tables, of the newest record of each device and case."""
    records = stored.speed(benchmark, "gpu", by_device=True)
    return make(records) if make in _TOGETHER else "\n".join(map(make, _by_device(records).values()))


def _by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of every device."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["environment"]["device_name"], []).append(record)
    return found


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: partial(_made, make, benchmark) for make, benchmark in _SOURCES.items()
}


def _ratio(figures: dict[str, Any], name: str) -> str:
    found = figures["ratios"].get(name)
    return "" if found is None else f"{found:.2f}x"


def _times(figures: dict[str, Any], name: str) -> str:
    ratio = _ratio(figures, name)
    return f" ({ratio})" if ratio else ""


def _source(records: Sequence[Record], said: str) -> str:
    models = "; ".join(dict.fromkeys(_IN_WORDS.get(name, name) for record in records if (name := record["model"])))
    text = said[0].upper() + said[1:].removesuffix(".")
    how = f"Measured with {models}," if models else "Run"
    made = partial(made_by, packages=("torch", "triton", "transformers"))
    runs = " and ".join(f"on {device}, {made(*found)}" for device, found in _by_device(records).items())
    return f"{text}. {how} {runs}; `benchmarks/results/gpu.jsonl`.\n"
