"""Tables of accuracy and memory by preset, made from the stored records."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import COMPRESSED
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, small, source, table
from esm_turbo.config import COMPARISON_PRESETS

_DOMAINS, _LONG = "cath_val200", "long_human"
# Kinds of records, the family in words, and the model they were measured with.
_FAMILIES = {"accuracy": ("ESM-2", "esm2-mini"), "families": ("ESM-C", "esmc-mini")}
_OTHERS = list(COMPARISON_PRESETS)
_SIZES_SOURCE = (
    "Size of a cache of 1,024 tokens with everything stored for it. It follows from the geometry alone; no weights are"
    " needed. `benchmarks/results/memory.jsonl`.\n"
)
_MIB = 2**20


def overview() -> str:
    """The product's presets: memory, and leave-one-out accuracy on domains."""
    rows = []
    for name in COMPRESSED:
        record = stored.accuracy(_DOMAINS, name)
        memory, figures = _preset(record)["memory"], _residues(record)
        cells = [f"`{name}`", f"{memory['bits_per_element']:.2f}", f"{memory['ratio_to_fp16']:.1f}x"]
        rows.append([*cells, cosine(figures), small(figures["kl_mean"])])
    head = ["preset", "bits", "vs fp16", "cosine (1 %)", "KL"]
    return table(head, rows) + source(stored.accuracy(_DOMAINS, "turbo3"), "accuracy")


def families() -> str:
    """The small models of ESM-2 and ESM-C: leave-one-out on domains and on long proteins."""
    rows = []
    for name in COMPRESSED:
        cells = [f"`{name}`"]
        for proteins in (_DOMAINS, _LONG):
            for kind in _FAMILIES:
                figures = _residues(stored.accuracies(proteins, kind=kind)[name])
                cells += [cosine(figures), small(figures["kl_mean"])]
        rows.append(cells)
    where = ("domains", "600 to 1,022 residues")
    head = [
        "preset",
        *(title for place in where for m, _ in _FAMILIES.values() for title in (f"{place}, {m}: cosine (1 %)", "KL")),
    ]
    sources = (
        source(stored.accuracies(_DOMAINS, kind=kind)["turbo3"], kind, model) for kind, (_, model) in _FAMILIES.items()
    )
    return table(head, rows) + " ".join(map(str.rstrip, sources)) + "\n"


def homologs() -> str:
    """The small model of E1 after homologs: perplexity of every preset, and its change by compression."""

    def cell(name: str, figures: dict[str, Any]) -> str:
        change = "" if name == "exact" else f" ({figures['perplexity_over_exact'] - 1:+.2%})"
        return f"{figures['perplexity']:.2f}{change}"

    presets = "exact", *COMPRESSED
    newest = stored.newest("homologs", lambda figures: (figures["preset"], figures["shape"]["homologs"]))
    found = {key: record["figures"] for key, record in newest.items()}
    # Without homologs nothing is stored, and only `exact` has a row.
    counts = sorted({count for name, count in found if name in presets})
    rows = [
        [f"`{name}`", *(cell(name, found[name, count]) if (name, count) in found else "-" for count in counts)]
        for name in presets
    ]
    head = [f"{count} homolog{'s' * (count != 1)}" for count in counts]
    last = presets[0], counts[-1]
    size = f"{found[last]['families']} families, {found[last]['residues']:,} residues. "
    return table(["preset", *head], rows) + size + source(newest[last], "homologs", "e1-mini")


def frozen_queries() -> str:
    """The small model of E1 with a frozen query after homologs: errors of scores by residues refreshed."""
    newest = stored.newest("frozen_queries", lambda figures: figures["refresh"])
    rows = []
    for refresh, record in sorted(newest.items()):
        figures = record["figures"]
        numbers = small(figures["error_mean"]), small(figures["error_max"]), f"{figures['speedup']:.1f}x"
        rows.append([str(refresh), f"{figures['spearman']:.4f}", *numbers])
    head = ["refreshed", "Spearman with whole proteins", "mean difference", "largest difference", "speedup"]
    figures = newest[0]["figures"]
    size = (
        f"{figures['variants']:,} variants of {figures['families']} proteins, whose scores have a standard deviation of"
        f" {figures['score_sd']:.1f}. "
    )
    return table(head, rows) + size + source(newest[0], "frozen_queries", "e1-mini")


def codecs() -> str:
    """Every preset that was measured, by bits: memory, and leave-one-out accuracy."""
    rows, found = [], by_bits(_DOMAINS)
    for name, domains in found.items():
        memory, figures = _preset(domains)["memory"], _residues(domains)
        rows.append([f"`{name}`", f"{memory['bits_per_element']:.2f}", cosine(figures), small(figures["kl_mean"])])
    head = ["preset", "bits", "cosine (1 %)", "KL"]
    return table(head, rows) + source(found["int4"], "accuracy", others=list(found.values()))


def freezing() -> str:
    """Extension at the end: what freezing costs and what compressing costs, by residues refreshed."""
    rows = []
    # At full precision a context is the frozen arm.
    frozen = _preset(stored.accuracy(_DOMAINS, "exact", "extend"))["extend"]
    for new in (1, 8, 32):
        arms = {"frozen against full": [(e, "against_full") for e in frozen]}
        extend = _preset(stored.accuracy(_DOMAINS, "turbo3", "extend"))["extend"]
        arms["`turbo3` against frozen"] = [(e, "against_frozen") for e in extend]
        for arm, entries in arms.items():
            chosen = [(e, side) for e, side in entries if e["new_residues"] == new]
            rows.append([str(new), arm, *(cosine(e[side]["residues"]) for e, side in chosen)])
    return table(["new residues", "cosine (1 %)", "0 refreshed", "8 refreshed", "32 refreshed"], rows) + source(
        stored.accuracy(_DOMAINS, "turbo3", "extend"), "accuracy"
    )


def allocation() -> str:
    """Leave-one-out with bytes where a layer or a head needs them most, against the same in all layers."""
    found = stored.newest("allocation", lambda figures: (figures["case"], figures["preset"])).values()
    places = {"same": "the same everywhere", "layers": "by layer", "heads": "by head"}
    rows, models = [], list(dict.fromkeys(record["model"] for record in found))
    for record in found:
        arms = record["figures"]["arms"]
        cells = (cell for name in places for cell in (cosine(arms[name]), small(arms[name]["kl_mean"])))
        rows.append([f"`{record['figures']['preset']}`, {record['model']}", *cells])
    head = ["bytes", *(title for place in places.values() for title in (f"{place}: cosine (1 %)", "KL"))]
    record = next(iter(found))
    size = f"{record['figures']['proteins']} domains, {record['figures']['arms']['same']['tokens']:,} residues. "
    return table(head, rows) + size + source(record, "allocation", " and ".join(models))


def refreshing() -> str:
    """Freezing error against cost: schedules of refreshed residues, and fitted corrections."""
    found = list(stored.newest("refreshing", lambda figures: figures["case"]).values())
    models = [record["model"] for record in found]
    arms = [record["figures"]["arms"] for record in found]
    rows = []
    for name, first in sorted(arms[0].items(), key=lambda arm: arm[1]["cost"]):
        cells = (cell for of_model in arms for cell in (cosine(of_model[name]), small(of_model[name]["kl_mean"])))
        rows.append([name, f"{first['cost']:,.0f}", *cells])
    head = ["refreshed", "tokens x layers", *(t for model in models for t in (f"{model}: cosine (1 %)", "KL"))]
    size = f"The last 8 residues of {found[0]['figures']['domains']} domains are new. "
    return table(head, rows) + size + source(found[0], "refreshing", " and ".join(models))


def fp8() -> str:
    """Whole forwards with some products in eight bits against float32."""
    found = list(stored.newest("fp8", lambda figures: figures["case"]).values())
    models, shares = [record["model"] for record in found], [record["figures"]["shares"] for record in found]
    rows = [
        [name, *(cell for of_model in shares for cell in (cosine(of_model[name]), small(of_model[name]["kl_mean"])))]
        for name in ("none", "all")
    ]
    head = ["products in eight bits", *(title for model in models for title in (f"{model}: cosine (1 %)", "KL"))]
    size = f"{found[0]['figures']['proteins']} domains, {found[0]['figures']['residues']:,} residues. "
    said = source(found[0], "fp8", " and ".join(models)).replace(" in float32", " in bfloat16, against float32,")
    return table(head, rows) + size + said


def calibration_size() -> str:
    """KL of leave-one-out by the number of proteins of a calibration: the least and the largest of its draws."""
    sizes: dict[int, list[Record]] = {}
    for record in stored.newest("calibration_size", lambda figures: figures["case"]).values():
        sizes.setdefault(record["figures"]["calibration_proteins"], []).append(record)
    presets = ("turbo3", "turbo2", "turbo1", "paper")
    rows = []
    for size, draws in sorted(sizes.items()):
        kls = ([draw["figures"]["presets"][preset]["all"]["kl_mean"] for draw in draws] for preset in presets)
        cells = (small(min(kl)) if len(kl) == 1 else f"{small(min(kl))} to {small(max(kl))}" for kl in kls)
        rows.append([str(size), str(len(draws)), *cells])
    head = ["proteins", "draws", *(f"`{preset}`: KL" for preset in presets)]
    return table(head, rows) + source(draws[0], "calibration_size")


def class_shift_paper() -> str:
    """Mainly beta proteins after calibrations on mainly beta and on mainly alpha proteins, by preset."""
    found = _by_class()
    rows = []
    for preset in found["mainly_beta"]:
        beta, alpha = (found[group][preset]["mainly_beta"] for group in ("mainly_beta", "mainly_alpha"))
        difference = alpha["cosine_mean"] - beta["cosine_mean"]
        rows.append([f"`{preset}`", cosine(beta), cosine(alpha), f"{difference:+.5f}"])
    head = ["measured on mainly beta", "calibrated on mainly beta", "calibrated on mainly alpha", "difference"]
    record = next(iter(stored.newest("class_shift", lambda figures: figures["case"]).values()))
    return table(head, rows) + source(record, "class_shift")


def _by_class() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Accuracies of every calibration, preset and class measured."""
    found = stored.newest("class_shift", lambda figures: figures["case"])
    return {case: record["figures"]["presets"] for case, record in found.items()}


def memory_by_geometry() -> str:
    """Bytes at all published geometries."""
    rows = []
    for name, record in stored.newest("memory", lambda figures: figures["size"]).items():
        figures = record["figures"]["presets"]
        cells = (f"{figures[preset]['bytes'] / _MIB:,.1f}" for preset in ("fp16", *COMPRESSED))
        rows.append([f"{name}: {_geometry(record)}", *cells])
    head = ["MiB; layers x heads x head_dim", "fp16", *(f"`{name}`" for name in COMPRESSED)]
    return table(head, rows) + _SIZES_SOURCE


def _geometry(record: Record) -> str:
    shape = record["figures"]["shape"]
    return f"{shape['num_layers']} x {shape['num_heads']} x {shape['head_dim']}"


def by_bits(proteins: str, part: str = "leave_one_out") -> dict[str, Record]:
    """Newest records of all compressed presets on a protein set, the most bits first."""
    found = {n: r for n, r in stored.accuracies(proteins, part).items() if n in COMPRESSED or n in _OTHERS}
    return dict(sorted(found.items(), key=lambda item: -_preset(item[1])["memory"]["bits_per_element"]))


def _preset(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = record["figures"]["preset"]
    return found


def _residues(record: Record) -> dict[str, float]:
    found: dict[str, float] = _preset(record)["leave_one_out"]["against_frozen"]["residues"]
    return found


TABLES = {
    function.__name__: function
    for function in (
        overview, families, homologs, frozen_queries,
        codecs, freezing, allocation, refreshing, fp8,
        calibration_size, class_shift_paper, memory_by_geometry,
    )
}  # fmt: skip
