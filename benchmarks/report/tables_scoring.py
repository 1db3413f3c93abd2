"""Tables about scoring candidates and variants, made from the stored records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness import stored
from benchmarks.harness.names import screening_arms
from benchmarks.harness.stored import Record
from benchmarks.report.markdown import source, table

Figures = dict[str, Any]
_LARGEST_SCREEN = 1000
_SHOWN_REFRESHES = ("", "0", "8", "32")
_SHOWN_VARIANT_ARMS = (
    "full, masked", "full, wild_type", "frozen, wild_type", "frozen, masked, 0", "frozen, masked, 8",
    "frozen, masked, 32", "turbo3, wild_type", "turbo3, masked, 8", "turbo2, masked, 8", "turbo1, wild_type",
    "turbo1, masked, 8",
)  # fmt: skip


def screening() -> str:
    """Agreement of the cached arms with the full one on targets and peptides, and what they cost."""
    speed = speed_record("scoring_12_on_500")["figures"]["ratios"]
    rows = []
    found = screened()
    for arm in ["full", *screening_arms()]:
        figures = found[arm]
        kind, place, refresh = _parts(arm)
        if refresh not in _SHOWN_REFRESHES:
            continue
        faster = speed.get(f"{_speed_name(kind)}, {refresh} refreshed, {_LARGEST_SCREEN} candidates / full")
        rows.append(
            [
                f"`{kind}`",
                place,
                refresh,
                "1" if kind == "full" else "" if faster is None else f"{faster:.0f}",
                *(
                    ["", ""]
                    if kind == "full"
                    else [
                        f"{figures['mean_difference']:.4f}",
                        f"{figures['spearman']:.3f} ({figures['lowest_spearman']:.2f})",
                    ]
                ),
                f"{figures['ahead_of_shuffled']:.2f}",
                f"{figures['ahead_of_swapped']:.2f}",
            ]
        )
    record = screening_records()[0]
    head = [
        "arm",
        "placeholder",
        "refreshed",
        "speedup",
        "difference, nats per residue",
        "Spearman (lowest)",
        "win rate, shuffled",
        "win rate, swapped",
    ]
    targets = sum(len(one["figures"]["targets_scored"]) for one in screening_records())
    return table(head, rows) + f"{targets} targets. " + source(record, "screening")


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
    """Candidates a second of the arms, by model and size of the screen."""
    rows, last = [], None
    for record in speed_records("scoring_12_on_500"):
        figures, last = record["figures"], record
        rates, ratios = figures["candidates_per_second"], figures["ratios"]
        for arm in ("frozen", "turbo"):
            cells = []
            for screen in (20, 100, 1000):
                name = f"{arm}, 8 refreshed, {screen} candidates"
                cells.append(f"{rates[name]:.3g} ({ratios[f'{name} / full']:.0f}x)")
            where = figures["shape"]["device"]
            rows.append([record["model"], where, f"{rates['full']:.3g}", f"`{arm}`", *cells])
    if last is None:
        raise LookupError("no records of scoring speed")
    head = ["model", "device", "full", "arm", "20 candidates", "100", "1,000"]
    models = "the models in the first column"
    return table(head, rows) + source(last, "cpu", models)


def variant_effects() -> str:
    """Correlation with measured fitness and with the full arm, and cost."""
    speed = speed_record("variant_positions")["figures"]["ratios"]
    record = variant_record("fitness")
    rows = []
    for arm in _SHOWN_VARIANT_ARMS:
        figures = record["figures"]["arms"][arm]
        kind, method, refresh = _parts(arm)
        faster = speed.get(f"full / {_speed_name(kind)}, {refresh} refreshed") if method == "masked" else None
        rows.append(
            [
                f"`{kind}`",
                method.replace("_", "-"),
                refresh,
                "1" if arm == "full, masked" else "" if faster is None else f"{faster:.0f}",
                f"{figures['spearman_with_measured']:.3f}",
                f"{figures['spearman_with_full']:.3f}",
            ]
        )
    head = ["arm", "marginals", "refreshed", "speedup", "Spearman with fitness", "Spearman with full, masked"]
    return table(head, rows) + source(record, "variants")


def variant_leak() -> str:
    """Predictions of masked residues from cached proteins that have seen them."""
    record = variant_record("leak")
    rows = []
    for arm in _SHOWN_VARIANT_ARMS:
        figures = record["figures"]["arms"][arm]
        kind, method, refresh = _parts(arm)
        rows.append(
            [
                f"`{kind}`",
                method.replace("_", "-"),
                refresh,
                f"{figures['wild_type_gain']:+.3f}",
                f"{figures['divergence']:.3f}",
                f"{100 * figures['wild_type_first']:.1f} %",
            ]
        )
    head = ["arm", "marginals", "refreshed", "wild-type gain, nats", "KL from full, nats", "wild type ranked first"]
    figures = record["figures"]
    said = f"{figures['positions']:,} positions of {figures['tested']} CATH domains. "
    return table(head, rows) + said + source(record, "variants")


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


def variant_record(case: str) -> Record:
    """The newest record of a case of the variants."""
    return stored.newest("variants", lambda figures: figures["case"] if figures["case"] == case else None)[case]


def speed_record(benchmark: str) -> Record:
    """The newest record of a benchmark of one case."""
    return stored.newest("speed", lambda f: f["benchmark"] if f["benchmark"] == benchmark else None, "cpu")[benchmark]


def speed_records(prefix: str) -> list[Record]:
    """The newest record of every benchmark whose name begins so."""
    found = stored.newest("speed", lambda f: f["benchmark"] if f["benchmark"].startswith(prefix) else None, "cpu")
    return list(found.values())


def _parts(arm: str) -> tuple[str, str, str]:
    """Arm or preset, place or method, and residues refreshed."""
    kind, *rest = arm.split(", ")
    place, refresh = [*rest, "", ""][:2]
    return kind, place, refresh


def _speed_name(kind: str) -> str:
    # The speed is measured with the default preset.
    return "turbo" if kind == "turbo3" else kind


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


TABLES: Mapping[str, Callable[[], str]] = {
    "screening": screening,
    "specificity": specificity,
    "scoring_speed": scoring_speed,
    "variant_effects": variant_effects,
    "variant_leak": variant_leak,
}
