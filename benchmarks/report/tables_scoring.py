"""Tables about scoring candidates and variants, made from the stored records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import SCREENS, screening_arms
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import source, table
from esm_turbo.config import DEFAULT_REFRESH

Figures = dict[str, Any]
_LARGEST_SCREEN = 1000
_SHOWN_REFRESHES = ("", "0", "8", "32")
_SHOWN_VARIANT_ARMS = (
    "full, masked", "full, wild_type", "frozen, wild_type", "frozen, masked, 0", "frozen, masked, 8",
    "frozen, masked, 32", "turbo3, wild_type", "turbo3, masked, 8", "turbo2, masked, 8", "turbo1, wild_type",
    "turbo1, masked, 8",
)  # fmt: skip
_VARIANT_HEAD = ("arm", "marginals", "refreshed")


def screening() -> str:
    """Agreement of the cached arms with the full one on targets and peptides, and what they cost."""
    [speed] = stored.speed("scoring_12_on_500")
    rows, means = [], screened()
    for arm in ("full", *screening_arms()):
        figures = means[arm]
        kind, place, refresh = _parts(arm)
        if refresh not in _SHOWN_REFRESHES:
            continue
        name = f"{_speed_name(kind)}, {refresh} refreshed, {_LARGEST_SCREEN} candidates / full"
        if kind == "full":
            compared = ["1", "", ""]
        else:
            spearman = f"{figures['spearman']:.3f} ({figures['lowest_spearman']:.2f})"
            compared = [_rounded(speed["figures"]["ratios"].get(name)), f"{figures['mean_difference']:.4f}", spearman]
        ahead = (f"{figures[f'ahead_of_{decoys}']:.2f}" for decoys in ("shuffled", "swapped"))
        rows.append([f"`{kind}`", place, refresh, *compared, *ahead])
    head = ["arm", "placeholder", "refreshed", "speedup", "difference, nats per residue", "Spearman (lowest)",
            "win rate, shuffled", "win rate, swapped"]  # fmt: skip
    records = screening_records()
    targets = sum(len(record["figures"]["targets_scored"]) for record in records)
    return table(head, rows) + f"{targets} targets. " + source(records[0], "screening")


_NUMBERS = {
    "likelihood": ("`pseudo_perplexity`", "", "1"),
    "specificity, alone": ("`specificity`", "`alone`", "1 + 1 / targets"),
    "specificity, decoys": ("`specificity`", "`all-decoys`", "1 + 12 / targets"),
    "specificity_z, decoys": ("`specificity_z`", "`all-decoys`", "1 + 12 / targets"),
    "specificity, targets": ("`specificity`", "`targets`", "1"),
    "specificity_z, targets": ("`specificity_z`", "`targets`", "1"),
}


def specificity() -> str:
    """Ranks of true binders by each number."""
    record = stored.newest("specificity", lambda figures: figures["case"])["all pairs"]
    figures = record["figures"]
    rows = []
    for name, labels in _NUMBERS.items():
        one = figures["numbers"][name]
        mean, error = statistics.fmean(one["percentiles"]), statistics.stdev(one["percentiles"])
        error /= len(one["percentiles"]) ** 0.5
        rows.append([*labels, f"{mean:.3f} ± {error:.3f}", str(one["first"]), f"{one['between_targets']:.2f}"])
    head = ["number", "background", "cost", "percentile of the binder", "binders first", "correlation between targets"]
    count, shape = len(figures["numbers"]["likelihood"]["percentiles"]), figures["shape"]
    said = f"{count} binders, each among {shape['candidates']} peptides on its target; mean and standard error. "
    return table(head, rows) + said + source(record, "specificity")


def scoring_speed() -> str:
    """Candidates a second of the arms, by size of the screen."""
    [record] = stored.speed("scoring_12_on_500")
    figures, rows = record["figures"], []
    rates, ratios = figures["candidates_per_second"], figures["ratios"]
    for arm in ("frozen", "turbo"):
        names = [f"{arm}, {DEFAULT_REFRESH} refreshed, {screen} candidates" for screen in SCREENS]
        cells = (f"{rates[name]:.3g} ({ratios[f'{name} / full']:.0f}x)" for name in names)
        rows.append([record["model"], figures["shape"]["device"], f"{rates['full']:.3g}", f"`{arm}`", *cells])
    head = ["model", "device", "full", "arm", "20 candidates", "100", "1,000"]
    return table(head, rows) + source(record, "cpu", "the models in the first column")


def variant_effects() -> str:
    """Correlation with measured fitness and with the full arm, and cost."""
    [speed] = stored.speed("variant_positions")

    def cells(arm: str, figures: Figures) -> list[str]:
        kind, method, refresh = _parts(arm)
        faster = speed["figures"]["ratios"].get(f"full / {_speed_name(kind)}, {refresh} refreshed")
        return [
            "1" if arm == "full, masked" else _rounded(faster if method == "masked" else None),
            *(f"{figures[f'spearman_with_{other}']:.3f}" for other in ("measured", "full")),
        ]

    record, rows = _variants("fitness", cells)
    head = [*_VARIANT_HEAD, "speedup", "Spearman with fitness", "Spearman with full, masked"]
    return table(head, rows) + source(record, "variants")


def variant_leak() -> str:
    """Predictions of masked residues from cached proteins that have seen them."""

    def cells(arm: str, figures: Figures) -> list[str]:
        first = f"{100 * figures['wild_type_first']:.1f} %"
        return [f"{figures['wild_type_gain']:+.3f}", f"{figures['divergence']:.3f}", first]

    record, rows = _variants("leak", cells)
    head = [*_VARIANT_HEAD, "wild-type gain, nats", "KL from full, nats", "wild type ranked first"]
    figures = record["figures"]
    said = f"{figures['positions']:,} positions of {figures['tested']} CATH domains. "
    return table(head, rows) + said + source(record, "variants")


def _variants(case: str, cells: Callable[[str, Figures], list[str]]) -> tuple[Record, list[list[str]]]:
    """The newest record of a case of the variants, and a row for each arm that is shown."""
    record = stored.newest("variants", lambda figures: figures["case"])[case]
    rows = []
    for arm in _SHOWN_VARIANT_ARMS:
        kind, method, refresh = _parts(arm)
        rows.append([f"`{kind}`", method.replace("_", "-"), refresh, *cells(arm, record["figures"]["arms"][arm])])
    return record, rows


def screening_records() -> list[Record]:
    """All groups of targets of the newest run."""
    found = stored.newest("screening", lambda figures: (figures["case"], str(figures["shape"])))
    newest = max(found.values(), key=lambda record: record["date"])
    return [record for record in found.values() if record["figures"]["shape"] == newest["figures"]["shape"]]


def screened() -> dict[str, Figures]:
    """Means over targets by arm, and the lowest correlation."""
    targets = [target["arms"] for record in screening_records() for target in record["figures"]["targets_scored"]]
    means: dict[str, Figures] = {}
    for arm in targets[0]:
        means[arm] = {name: _mean([target[arm][name] for target in targets]) for name in targets[0][arm]}
        known = [target[arm].get("spearman") for target in targets]
        means[arm]["lowest_spearman"] = min((one for one in known if one is not None), default=None)
    return means


def _parts(arm: str) -> tuple[str, str, str]:
    """Arm or preset, place or method, and residues refreshed."""
    kind, *rest = arm.split(", ")
    place, refresh = [*rest, "", ""][:2]
    return kind, place, refresh


def _speed_name(kind: str) -> str:
    # The speed is measured with the default preset.
    return "turbo" if kind == "turbo3" else kind


def _rounded(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


TABLES = {
    function.__name__: function for function in (screening, specificity, scoring_speed, variant_effects, variant_leak)
}
