"""Tables of accuracy and memory by preset and by calibration, made from the stored records."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import COMPRESSED
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import accuracy, accuracy_head, cosine, made_by, small, source, table
from esm_turbo.config import COMPARISON_PRESETS
from esm_turbo.files.tabular import counted

_DOMAINS, _LONG = "cath_val200", "long_human"
# Kinds of records, the family in words, and the model they were measured with.
_FAMILIES = {"accuracy": ("ESM-2", "esm2-mini"), "families": ("ESM-C", "esmc-mini")}
_SIZES_SOURCE = (
    "Size of a cache of 1,024 tokens with everything stored for it. It follows from the geometry alone; no weights are"
    " needed. `benchmarks/results/memory.jsonl`.\n"
)
_MIB = 2**20
_PLANTS = {
    "outliers x1": "none",
    "keys x10": "keys x10",
    "keys x60": "keys x60",
    "outliers x10": "keys and values x10",
    "outliers x60": "keys and values x60",
}


def overview() -> str:
    """The product's presets: memory, and leave-one-out accuracy on domains."""
    rows = []
    for name in COMPRESSED:
        record = stored.accuracy(_DOMAINS, name)
        memory, figures = _preset(record)["memory"], _residues(record)
        cells = [f"`{name}`", f"{memory['bits_per_element']:.2f}", f"{memory['ratio_to_fp16']:.1f}x"]
        rows.append([*cells, *accuracy(figures)])
    head = ["preset", "bits", "vs fp16", "cosine (1 %)", "KL"]
    return table(head, rows) + source(stored.accuracy(_DOMAINS, "turbo3"), "accuracy")


def families() -> str:
    """The small models of ESM-2 and ESM-C: leave-one-out on domains and on long proteins."""
    rows = []
    for name in COMPRESSED:
        cells = [f"`{name}`"]
        for proteins in (_DOMAINS, _LONG):
            for kind in _FAMILIES:
                cells += accuracy(_residues(stored.accuracies(proteins, kind=kind)[name]))
        rows.append(cells)
    where = ("domains", "600 to 1,022 residues")
    head = accuracy_head(*(f"{place}, {family}" for place in where for family, _ in _FAMILIES.values()))
    sources = (
        source(stored.accuracies(_DOMAINS, kind=kind)["turbo3"], kind, model) for kind, (_, model) in _FAMILIES.items()
    )
    return table(["preset", *head], rows) + " ".join(map(str.rstrip, sources)) + "\n"


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
        rows.append([f"`{name}`", f"{memory['bits_per_element']:.2f}", *accuracy(figures)])
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


def fp8() -> str:
    """Whole forwards with some products in eight bits against float32."""
    found = list(stored.newest("fp8", lambda figures: figures["case"]).values())
    models, shares = [record["model"] for record in found], [record["figures"]["shares"] for record in found]
    rows = [[name, *(cell for each in shares for cell in accuracy(each[name]))] for name in ("none", "all")]
    head = ["products in eight bits", *accuracy_head(*models)]
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


def calibration_cost() -> str:
    """Seconds and bytes of a calibration by size of the model."""
    rows, sources = [], []
    for record in (
        *stored.speed("calibration", by_device=True),
        *stored.speed("calibration_cuda", "gpu", by_device=True),
    ):
        figures, device, shape = record["figures"], record["environment"]["device_name"], record["figures"]["shape"]
        where = f"{device}, {counted(record['environment']['threads'], 'thread')}, {shape['dtype']}"
        size = str(shape["proteins"]), f"{shape['residues']:,}"
        cost = f"{figures['seconds']['all']['p50']:.1f}", f"{figures['file MiB']:.1f}"
        rows.append([record["model"], where, *size, *cost])
        sources.append(f"{record['model']}, {device}: {made_by(record)}.")
    head = ["model", "on", "proteins", "residues", "seconds", "file, MiB"]
    return table(head, rows) + " ".join(sources) + " `benchmarks/results/cpu.jsonl`, `gpu.jsonl`.\n"


def peer_outliers() -> str:
    """All codecs where channels are outliers, ours first."""
    found = stored.newest("peer_outliers", lambda figures: (figures["preset"], figures["case"]))
    rows = []
    for preset in sorted(dict.fromkeys(key[0] for key in found), key=lambda name: name not in COMPRESSED):
        figures = (found[preset, case]["figures"]["residues"] for case in _PLANTS)
        rows.append([f"`{preset}`", *(small(errors["kl_mean"]) for errors in figures)])
    records = list(found.values())
    size = f"{records[0]['figures']['shape']['tested']} domains. "
    return table(["KL", *_PLANTS.values()], rows) + size + source(records[0], "peer_outliers", others=records)


def memory_by_geometry() -> str:
    """Bytes at all published geometries."""
    rows = []
    for name, record in stored.newest("memory", lambda figures: figures["size"]).items():
        figures = record["figures"]["presets"]
        cells = (f"{figures[preset]['bytes'] / _MIB:,.1f}" for preset in ("fp16", *COMPRESSED))
        shape = record["figures"]["shape"]
        rows.append([f"{name}: {shape['num_layers']} x {shape['num_heads']} x {shape['head_dim']}", *cells])
    head = ["MiB; layers x heads x head_dim", "fp16", *(f"`{name}`" for name in COMPRESSED)]
    return table(head, rows) + _SIZES_SOURCE


def by_bits(proteins: str, part: str = "leave_one_out") -> dict[str, Record]:
    """Newest records of all compressed presets on a protein set, the most bits first."""
    found = {n: r for n, r in stored.accuracies(proteins, part).items() if n in (*COMPRESSED, *COMPARISON_PRESETS)}
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
        codecs, freezing, fp8, calibration_size, calibration_cost, peer_outliers, memory_by_geometry,
    )
}  # fmt: skip
