"""Reports of the commands other than `score` and `variants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from esm_turbo.files.quality import Figures, Quality
from esm_turbo.files.tabular import counted
from esm_turbo.files.text_tables import text_table

if TYPE_CHECKING:
    from esm_turbo.config import Geometry
    from esm_turbo.proteins.fasta import BadRecord

_COUNTED = ("sequences", "residues")


def failures(bad: Sequence[BadRecord]) -> list[dict[str, str]]:
    """Bad records as JSON values."""
    return [{"record": one.record, "reason": one.reason} for one in bad]


def calibration_report(result: Mapping[str, Any], geometry: Geometry) -> list[object]:
    """The summary of a calibration by class and length."""
    record = result["provenance"]
    done = (
        f"{record['model']} ({geometry}) calibrated on {record['sequences']:,} proteins,"
        f" {record['residues']:,} residues: {result['out']}, {bytes_text(result['bytes'])}"
    )
    return [*_count_tables(record), *_quality_tables(result["quality"]), done]


def _count_tables(record: Mapping[str, Any]) -> list[Table]:
    tables = []
    for key, title in (("classes", "class"), ("lengths", "residues per protein")):
        groups: Mapping[str, Mapping[str, int]] = record.get(key, {})
        total = max(1, sum(group["residues"] for group in groups.values()))
        rows = [
            [name, *(f"{group[what]:,}" for what in _COUNTED), f"{100 * group['residues'] / total:.1f}"]
            for name, group in groups.items()
        ]
        if rows:
            tables.append(text_table("", [title, "proteins", "residues", "% of residues"], rows))
    return tables


def _quality_tables(values: Mapping[str, Any] | None) -> list[Table]:
    """Measurements of a calibration: the errors of each preset, of freezing, and of eight-bit products."""
    if values is None:
        return []
    quality = Quality.from_dict(values)
    measured = f"{counted(quality.proteins, 'protein')} outside of the calibration, {quality.residues:,} residues"
    rows = [
        [name, *_figures(figures), "no" if quality.shortfall(name) else "yes"]
        for name, figures in quality.presets.items()
    ]
    columns = ["cosine", "1 %", "KL, nats", "99 %", "top-1"]
    tables = [
        text_table(
            f"presets against full precision, every residue in turn; {measured}",
            ["preset", *columns, "as expected"],
            rows,
        )
    ]
    if quality.freezing:
        rows = [[str(refreshed), *_figures(figures)] for refreshed, figures in quality.freezing.items()]
        title = f"freezing error: the last {quality.new_residues} residues, full precision against the whole forward"
        tables.append(text_table(title, ["residues refreshed", *columns], rows))
    if (eight_bits := quality.eight_bits) is not None:
        rows = [["none", *_figures(eight_bits.every)]]
        if eight_bits.keep:
            kept = Counter(name for _, name in eight_bits.keep)
            names = ", ".join(f"{name} of {counted(layers, 'layer')}" for name, layers in kept.items())
            rows.append([names, *_figures(eight_bits.chosen)])
        title = "precision fp8: whole forwards against the model in bfloat16"
        tables.append(text_table(title, ["left in bfloat16", *columns], rows))
    return tables


def _figures(figures: Figures) -> list[str]:
    cosines = [f"{figures.cosine_mean:.5f}", f"{figures.cosine_q01:.4f}"]
    return [*cosines, f"{figures.kl_mean:.2g}", f"{figures.kl_q99:.2g}", f"{figures.top1_agreement:.4f}"]


def info_report(result: Mapping[str, Any]) -> list[object]:
    """Tables of everything that `esm-turbo info` found."""
    if result["kind"] == "context_store":
        return _store_tables(result)
    parts: list[object] = []
    shown: dict[str, Any] = {"kind": result["kind"]}
    geometry = result.get("geometry")
    if geometry is not None:
        shown["geometry"] = f"{geometry['num_layers']} layers x {geometry['num_heads']} heads x {geometry['head_dim']}"
    for name, value in result.items():
        if name not in {"kind", "geometry", "cache", "provenance", "quality", "environment"}:
            shown[name.replace("_", " ")] = value
    record = dict(result.get("provenance", {}))
    tables = _count_tables(record)
    for name, value in record.items():
        if name not in {"classes", "lengths"}:
            shown[name.replace("_", " ")] = value
    shown = {name: value for name, value in shown.items() if value is not None}
    parts += [_pairs("", shown), *tables, *_quality_tables(result.get("quality"))]
    if "cache" in result:
        parts.append(_cache_table(result["cache"]))
    if "environment" in result:
        parts.append(_pairs("environment", result["environment"]))
    return parts


def _store_tables(result: Mapping[str, Any]) -> list[object]:
    usage = result["usage"]
    shown = {
        "kind": "store of contexts",
        "model": result["model"] or "none yet",
        "precision": result["precision"] or "-",
        "contexts": result["contexts"],
        "bytes": bytes_text(result["bytes"]),
        "look-ups": usage["looked_up"],
        "damaged": usage["damaged"],
    }
    rates = {"hits": usage["hit_rate"], **{f"hits {place}": rate for place, rate in usage["hit_rates"].items()}}
    shown |= {name: "-" if rate is None else f"{100 * rate:.1f} %" for name, rate in rates.items()}
    rows = [[p["preset"], f"{p['contexts']:,}", bytes_text(p["bytes"])] for p in result["presets"]]
    return [_pairs("", shown), text_table("", ["preset", "contexts", "bytes"], rows)]


def _cache_table(sizes: Mapping[str, Any]) -> Table:
    rows = [
        [name, bytes_text(size["bytes"]), f"{size['bits_per_element']:.2f}", f"{size['ratio_to_fp32']:.2f}x"]
        for name, size in sizes["presets"].items()
    ]
    title = f"cache of {sizes['batch_size']} x {sizes['tokens']:,} tokens"
    return text_table(title, ["stored as", "bytes", "bits per element", "smaller than fp32"], rows)


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    rows = [[name, _text(value)] for name, value in values.items()]
    table = text_table(title, ["", ""], rows, left=(0, 1), show_header=False, box=None)
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    return table


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bytes_text(count: float) -> str:
    """A number of bytes in the largest fitting unit, such as `1.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
