"""Tables of accuracy and memory by preset, made from the stored records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import COMPRESSED
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, small, source, table
from esm_turbo.config import COMPARISON_PRESETS, OPTIONAL_PRESETS, PRESETS

_DOMAINS, _LONG = "cath_val200", "long_human"
# Kinds of records, and the models they were measured with.
_FAMILIES = {"accuracy": "ESM-2", "families": "ESM-C"}
_BOTH = "esm2-mini and esmc-mini"
_OTHERS = [*COMPARISON_PRESETS, *OPTIONAL_PRESETS]


def overview() -> str:
    """The product's presets: memory, and leave-one-out accuracy on domains and on long proteins."""
    rows = []
    for name in COMPRESSED:
        memory = _preset(stored.accuracy(_DOMAINS, name))["memory"]
        cells = [f"`{name}`", f"{memory['bits_per_element']:.2f}", f"{memory['ratio_to_fp16']:.1f}x"]
        for proteins in (_DOMAINS, _LONG):
            figures = _residues(stored.accuracy(proteins, name))
            cells += [cosine(figures), small(figures["kl_mean"])]
        rows.append(cells)
    head = ["preset", "bits", "vs fp16", "domains: cosine (1 %)", "KL", "600 to 1,022 residues: cosine (1 %)", "KL"]
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
        *(title for place in where for m in _FAMILIES.values() for title in (f"{place}, {m}: cosine (1 %)", "KL")),
    ]
    return table(head, rows) + source(stored.accuracies(_DOMAINS, kind="families")["turbo3"], "families", _BOTH)


def families_outliers() -> str:
    """The small models of ESM-2 and ESM-C: outliers planted without changing the function."""
    kinds = dict(zip(("outliers", "families_outliers"), _FAMILIES.values(), strict=True))
    found = {kind: planted(kind) for kind in kinds}
    scales = sorted({scale for accuracies in found["families_outliers"].values() for scale in accuracies})
    rows = [
        [f"`{name}`", model, *(_planted_cell(found[kind][name][scale]) for scale in scales)]
        for name in COMPRESSED
        for kind, model in kinds.items()
    ]
    record = next(reversed(_planted_records("families_outliers").values()))
    return table(["cosine (1 %), KL", "model", *(f"x{scale:g}" for scale in scales)], rows) + source(
        record, "families_outliers", _BOTH
    )


def codecs() -> str:
    """Every preset that was measured, by bits: memory, and leave-one-out accuracy."""
    rows = []
    for name, domains in by_bits(_DOMAINS).items():
        memory, figures = _preset(domains)["memory"], _residues(domains)
        cells = [f"`{name}`", f"{memory['bits_per_element']:.2f}", f"{memory['ratio_to_fp16']:.1f}x"]
        cells += [cosine(figures), small(figures["kl_mean"]), f"{figures['top1_agreement']:.4f}"]
        rows.append(cells)
    head = ["preset", "bits", "vs fp16", "cosine (1 %)", "KL", "top-1"]
    return table(head, rows) + source(stored.accuracy(_DOMAINS, _some_other()), "accuracy")


def freezing() -> str:
    """Extension at the end: what freezing costs and what compressing costs, by residues refreshed."""
    rows = []
    # At full precision a context is the frozen arm.
    frozen = _preset(stored.accuracy(_DOMAINS, "exact", "extend"))["extend"]
    for new in (1, 8, 32):
        arms = {"frozen against full": [(e, "against_full") for e in frozen]}
        for name in ("turbo3", "turbo2"):
            extend = _preset(stored.accuracy(_DOMAINS, name, "extend"))["extend"]
            arms[f"`{name}` against frozen"] = [(e, "against_frozen") for e in extend]
        for arm, entries in arms.items():
            chosen = [(e, side) for e, side in entries if e["new_residues"] == new]
            rows.append([str(new), arm, *(cosine(e[side]["residues"]) for e, side in chosen)])
    return table(["new residues", "cosine (1 %)", "0 refreshed", "8 refreshed", "32 refreshed"], rows) + source(
        stored.accuracy(_DOMAINS, "turbo3", "extend"), "accuracy"
    )


def positions() -> str:
    """Figure 4: long proteins by position."""
    return _groups(_LONG, "by_position", {"1-300": "residues 1-300", "301-600": "301-600", "over 600": "after 600"})


def classes() -> str:
    """Figure 4: domains by structural class."""
    names = ("mainly_alpha", "mainly_beta", "alpha_beta", "little_structure")
    return _groups(_DOMAINS, "by_class", {name: name.replace("_", " ") for name in names})


def rotation() -> str:
    """The paper's codec by map of the keys and by scale, with and without planted outliers."""
    found = stored.newest("rotation", lambda figures: (figures["preset"], figures["case"]))
    names = {"svd": "the paper's rotation", "identity": "none", "hadamard": "random Hadamard"}
    cases = list(dict.fromkeys(case for _, case in found))
    rows = []
    for preset in dict.fromkeys(preset for preset, _ in found):
        kind, _, scale = preset.partition(", scale per ")
        cells = [found[preset, case]["figures"] for case in cases]
        rows.append(
            [
                names[kind],
                scale,
                *(f"{cosine(one['residues'])}, {one['stored']['snr_db']['score']:.1f}" for one in cells),
            ]
        )
    record = next(reversed(found.values()))
    said = f"{record['figures']['proteins']} domains, {record['figures']['residues']['tokens']:,} residues. "
    return table(["map of the keys", "scale per", *cases], rows) + said + source(record, "rotation")


def components() -> str:
    """Errors of stored keys, values and scores, and best keys found again, by preset."""
    found = stored.newest("components", lambda figures: figures["preset"])
    rows = []
    for name, record in found.items():
        one = record["figures"]["stored"]
        ks = sorted(one["recall"], key=int)
        cells = [f"{one['snr_db'][kind]:.1f}" for kind in ("key", "value", "score")]
        cells += [f"{one['recall'][k]:.3f}" for k in ks]
        rows.append([f"`{name}`" if name in PRESETS else name, *cells, f"{one['kurtosis']['stored']:.1f}"])
    record = next(reversed(found.values()))
    figures = record["figures"]
    head = [
        "preset",
        "keys, dB",
        "values, dB",
        "scores, dB",
        *(f"top {k}" for k in ks),
        "kurtosis",
    ]
    said = (
        f"{figures['proteins']} domains: {figures['stored']['draws']:,} queries of all layers and heads. Kurtosis"
        f" (excess) of the keys' channels as the model has them: {figures['stored']['kurtosis']['channels']:.1f}. "
    )
    return table(head, rows) + said + source(record, "components")


def residue_types() -> str:
    """KL of the compressed presets by residue."""
    found = stored.newest("components", lambda figures: figures["preset"] if figures["preset"] in COMPRESSED else None)
    letters = found["turbo3"]["figures"]["by_residue"]
    order = sorted(letters, key=lambda letter: -letters[letter]["kl_mean"])
    rows = [["residues", *(f"{letters[letter]['tokens']:,}" for letter in order)]]
    for name in ("paper", "turbo3", "turbo1"):
        by_residue = found[name]["figures"]["by_residue"]
        rows.append([f"`{name}`", *(small(by_residue[letter]["kl_mean"]) for letter in order)])
    return table(["KL, nats", *order], rows) + source(found["turbo3"], "components")


def planted(kind: str = "outliers") -> dict[str, dict[float, Mapping[str, float]]]:
    """Figures of residues by preset and size of the outliers, presets in the order of the registry."""
    records = _planted_records(kind)
    order = [*COMPRESSED, *_OTHERS]
    found: dict[str, dict[float, Mapping[str, float]]] = {}
    for preset, scale in sorted(records, key=lambda key: (order.index(key[0]), key[1])):
        figures = records[preset, scale]["figures"]
        found.setdefault(preset, {})[scale] = figures["against_frozen"]["residues"]
    return found


def by_bits(proteins: str, part: str = "leave_one_out") -> dict[str, Record]:
    """Newest records of all compressed presets on a protein set, the most bits first."""
    found = {n: r for n, r in stored.accuracies(proteins, part).items() if n in COMPRESSED or n in _OTHERS}
    return dict(sorted(found.items(), key=lambda item: -_preset(item[1])["memory"]["bits_per_element"]))


def _groups(proteins: str, part: str, columns: Mapping[str, str]) -> str:
    """Leave-one-out of the product's presets by group, columns by the group's name."""
    rows = []
    for name in COMPRESSED:
        groups = _preset(stored.accuracy(proteins, name))["leave_one_out"][part]
        rows.append([f"`{name}`", *(cosine(groups[g]) if g in groups else "" for g in columns)])
    return table(["cosine (1 %)", *columns.values()], rows) + source(stored.accuracy(proteins, "turbo3"), "accuracy")


def _planted_records(kind: str = "outliers") -> dict[Any, Record]:
    return stored.newest(kind, lambda figures: (figures["preset"], figures["scale"]))


def _planted_cell(figures: Mapping[str, float]) -> str:
    return f"{cosine(figures)}, {small(figures['kl_mean'])}"


def _preset(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = record["figures"]["preset"]
    return found


def _residues(record: Record) -> dict[str, float]:
    found: dict[str, float] = _preset(record)["leave_one_out"]["against_frozen"]["residues"]
    return found


def _some_other() -> str:
    return next(name for name in stored.accuracies(_DOMAINS) if name in _OTHERS)


TABLES = {
    function.__name__: function
    for function in (
        overview, families, families_outliers,
        codecs, freezing, positions, classes, rotation, components,
        residue_types,
    )
}  # fmt: skip
