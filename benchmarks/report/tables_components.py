"""Tables of stored errors, planted outliers, folds and motifs, and of what a calibration costs, from stored records."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import COMPRESSED
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import cosine, made_by, small, source, table
from esm_turbo.files.tabular import counted

_OTHERS = (
    "turboquant4", "turboquant3", "qjl_outliers", "qjl", "kivi4", "kivi2", "fp8", "int8", "int4", "spectral_layers",
    "spectral8", "spectral",
)  # fmt: skip
_VARIANTS = ("paper, shared LUT", "paper, no rotation", "paper, random Hadamard")
_PLANTS = {
    "outliers x1": "none",
    "keys x10": "keys x10",
    "keys x60": "keys x60",
    "outliers x10": "keys and values x10",
    "outliers x60": "keys and values x60",
}


def stored_errors() -> str:
    """Signal to noise of what is stored, recall of the best keys, and kurtosis of what is quantised."""
    found = stored.newest("components", lambda figures: figures.get("preset"))
    chosen = {name: found[name] for name in (*COMPRESSED, *_OTHERS, *_VARIANTS) if name in found}
    rows = []
    for name, record in chosen.items():
        figures = record["figures"]["stored"]
        decibels = (f"{figures['snr_db'][kind]:.1f}" for kind in ("key", "value", "score"))
        recall = (f"{figures['recall'][str(k)]:.3f}" for k in (1, 5, 10))
        label = name if name in _VARIANTS else f"`{name}`"
        rows.append([label, *decibels, *recall, f"{figures['kurtosis']['stored']:.1f}"])
    head = ["preset", "keys, dB", "values, dB", "scores, dB", "top 1", "top 5", "top 10", "kurtosis"]
    record = chosen["paper"]
    figures = record["figures"]
    said = (
        f"{figures['proteins']} domains: {figures['stored']['draws']:,} queries of all layers and heads. Kurtosis"
        f" (excess) of the keys' channels as the model has them: {figures['stored']['kurtosis']['channels']:.1f}. "
    )
    return table(head, rows) + said + source(record, "components", others=list(chosen.values()))


def peer_outliers() -> str:
    """All codecs where channels are outliers, ours first."""
    found = stored.newest("peer_outliers", lambda figures: (figures["preset"], figures["case"]))
    cases = [case for case in _PLANTS if any(case == key[1] for key in found)]
    rows = []
    presets = dict.fromkeys(key[0] for key in found)
    for preset in sorted(presets, key=lambda name: name not in COMPRESSED):
        figures = (found[preset, case]["figures"]["residues"] for case in cases)
        rows.append([f"`{preset}`", *(small(errors["kl_mean"]) for errors in figures)])
    records = list(found.values())
    head = ["KL", *(_PLANTS[case] for case in cases)]
    size = f"{records[0]['figures']['shape']['tested']} domains. "
    return table(head, rows) + size + source(records[0], "peer_outliers", others=records)


def folds() -> str:
    """KL by fold."""
    found = _groups()
    first = next(iter(found.values()))["figures"]["folds"]
    rows = []
    for group, members in first.items():
        if group != "all":
            number = str(members["domains"]), f"{members['residues']['tokens']:,}"
            rows.append([group, *number, *(_accuracy(record["figures"]["folds"][group]) for record in found.values())])
    return table(["fold", "domains", "residues", *(f"`{name}`" for name in found)], rows) + _groups_source()


def motifs() -> str:
    """KL inside motifs of active sites."""
    found = _groups()
    rows = []
    for motif in next(iter(found.values()))["figures"]["motifs"]:
        members = [record["figures"]["motifs"][motif] for record in found.values()]
        rows.append([motif, str(members[0]["residues"]["tokens"]), *map(_accuracy, members)])
    everywhere = [record["figures"]["folds"]["all"] for record in found.values()]
    rows.append(["all residues", f"{everywhere[0]['residues']['tokens']:,}", *map(_accuracy, everywhere)])
    return table(["pattern", "residues", *(f"`{name}`" for name in found)], rows) + _groups_source()


def _groups() -> dict[Any, Record]:
    return stored.newest("groups", lambda figures: figures["preset"])


def _groups_source() -> str:
    record = next(iter(_groups().values()))
    return f"Cosine (1 %), KL; leave-one-out on {record['figures']['proteins']} domains. " + source(record, "groups")


def _accuracy(group: dict[str, Any]) -> str:
    return f"{cosine(group['residues'])}, {small(group['residues']['kl_mean'])}"


def calibration_layers() -> str:
    """Signal to noise of scores by layer and by the number of proteins of a calibration."""
    found = stored.newest("calibration_layers", lambda figures: figures["calibration_proteins"])
    ordered = [found[size] for size in sorted(found)]
    rows = []
    for preset in ordered[0]["figures"]["snr_db"]:
        for record in ordered:
            figures = record["figures"]
            by_layer = (f"{decibels:.1f}" for decibels in figures["snr_db"][preset]["score"])
            rows.append([f"`{preset}`, {figures['calibration_proteins']} proteins", *by_layer])
    layers = (str(1 + layer) for layer in range(len(rows[0]) - 1))
    said = f"Scores, in dB; {ordered[0]['figures']['proteins']} domains. "
    return table(["layer", *layers], rows) + said + source(ordered[0], "calibration_layers", others=ordered)


def calibration_cost() -> str:
    """Seconds and bytes of a calibration by size of the model."""
    rows, sources = [], []
    for file, benchmark in (("cpu", "calibration"), ("gpu", "calibration_cuda")):
        found = stored.newest(
            "speed",
            lambda figures, benchmark=benchmark: (
                (figures["case"], figures["device_name"])
                if figures["benchmark"] == benchmark and "file MiB" in figures
                else None
            ),
            file=file,
        )
        for record in found.values():
            figures, device = record["figures"], record["environment"]["device_name"]
            seconds = f"{figures['seconds']['all']['p50']:.1f}"
            size = str(figures["shape"]["proteins"]), f"{figures['shape']['residues']:,}"
            threads = counted(record["environment"]["threads"], "thread")
            where = f"{device}, {threads}, {figures['shape']['dtype']}"
            rows.append([record["model"], where, *size, seconds, f"{figures['file MiB']:.1f}"])
            sources.append(f"{record['model']}, {device}: {made_by(record)}.")
    head = ["model", "on", "proteins", "residues", "seconds", "file, MiB"]
    return table(head, rows) + " ".join(sources) + " `benchmarks/results/cpu.jsonl`, `gpu.jsonl`.\n"


TABLES = {
    function.__name__: function
    for function in (stored_errors, peer_outliers, folds, motifs, calibration_layers, calibration_cost)
}
