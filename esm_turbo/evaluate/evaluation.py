"""The result of an evaluation: typed figures, JSON, and compact tables of text."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from esm_turbo.evaluate.metrics import Accuracy
from esm_turbo.evaluate.results import Frozen, Memory, PresetEvaluation, Provenance, TokenAccuracy
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.files.text_tables import text_table

_UNLIMITED = 10_000
_EXACT = "exact"
# Layers shown of a deep model; more would not fit on a page.
_LAYERS = 12
_FIGURES = ("cosine", "1 %", "lowest", "KL, nats", "99 %", "top-1", "rel. RMS")


@dataclass(frozen=True)
class Evaluation(Tabular):
    """Accuracy and memory of presets on proteins.

    Three computations are compared: *full* recomputes the whole sequence; *frozen* extends a context stored at full
    precision; *turbo* extends the same context as stored by a preset. The freezing error is frozen against full, the
    quantisation error turbo against frozen.

    Attributes:
        provenance: model, environment and data.
        frozen: the frozen arm.
        presets: the turbo arm, preset by preset, in the order requested.
        unavailable: presets of "all" that cannot run here, with the reason.
        precision: whole forwards against those of the same weights in another precision; None if there was none.
    """

    provenance: Provenance
    frozen: Frozen
    presets: tuple[PresetEvaluation, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    precision: TokenAccuracy | None = None

    def __repr__(self) -> str:
        size = f"{counted(self.provenance.proteins, 'protein')}, {counted(self.provenance.residues, 'residue')}"
        return named(self, self.provenance.model, size, *(preset.name for preset in self.presets))

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["preset", "bits_per_element", "ratio_to_fp16", "cosine_mean", "cosine_q01", "kl_mean"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per preset its size, and figure 1 against full precision, residues only."""
        for preset in self.presets:
            found, memory = preset.leave_one_out.against_frozen.residues, preset.memory
            sizes = memory.bits_per_element, memory.ratio_to_fp16
            yield preset.name, *sizes, found.cosine_mean, found.cosine_q01, found.kl_mean

    def __getitem__(self, name: str) -> PresetEvaluation:
        """Figures of a preset.

        Raises:
            KeyError: it was not evaluated.
        """
        for preset in self.presets:
            if preset.name == name:
                return preset
        raise KeyError(f"{name!r} was not evaluated, only {[preset.name for preset in self.presets]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: dictionaries, lists, strings, finite numbers, booleans and None."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return values

    def to_json(self, indent: int | None = None) -> str:
        """JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=indent)

    def table(self, width: int | None = None) -> str:
        """Tables of text with all figures.

        Args:
            width: columns to wrap to, without cutting any figure; None does not wrap.
        """

        return _render(self, width)


def _render(evaluation: Evaluation, width: int | None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=_UNLIMITED, color_system=None, highlight=False, markup=False)
    about = evaluation.provenance
    console.print(
        f"{about.model}, {about.dtype} on {about.device} ({about.device_name}), {counted(about.proteins, 'protein')},"
        f" {about.residues} residues\n"
        "full: the whole sequence recomputed; frozen: a context stored at full precision; turbo: as stored by the"
        " preset\n"
    )
    _print(console, _overview(evaluation), width)
    for name, reason in evaluation.unavailable.items():
        console.print(f"{name}: {reason}")
    if evaluation.unavailable:
        console.print()
    groups = [_groups(evaluation, kind) for kind in ("class", "length", "position")]
    for table in (_extend(evaluation), *groups, _layers(evaluation), _memory(evaluation)):
        if table is not None:
            _print(console, table, width)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _print(console: Console, table: Table, width: int | None) -> None:
    for column in table.columns:
        texts = [str(text) for text in (column.header, *column.cells)]
        words = texts if column.no_wrap else " ".join(texts).split()
        column.min_width = max(map(len, words))
    # Rich would wrap a table's title to the width of the table.
    title, table.title = table.title, None
    console.print(title)
    console.print(table, width=None if width is None else max(width, console.measure(table).minimum))


def _memory(evaluation: Evaluation) -> Table:
    tokens = evaluation.presets[0].memory.tokens
    columns = ("preset", "bits/element", "kB", "x FP32", "x fp16", "calibration, kB (shared)")
    table = _table(f"Memory of {tokens:,} tokens, overhead included", *columns)
    for preset in evaluation.presets:
        memory = preset.memory
        table.add_row(
            preset.name,
            f"{memory.bits_per_element:.3f}",
            f"{memory.nbytes / 1000:,.0f}",
            f"{memory.ratio_to_fp32:.2f}",
            f"{memory.ratio_to_fp16:.2f}",
            f"{memory.calibration_nbytes / 1000:,.0f}",
        )
    return table


def _overview(evaluation: Evaluation) -> Table:
    """Bits and accuracy of every preset by arm; full precision is the frozen arm."""
    tokens = evaluation.presets[0].memory.tokens
    how = "Leave-one-out: every position in turn is the new one"
    # Exact contexts are compared by their predictions alone.
    if not evaluation.presets[0].leave_one_out.by_layer:
        how = "After homologs: every residue is masked once"
    table = _table(
        f"{how}; residues, and the cosine of <cls> and <eos>; bits per element of {tokens:,} tokens, overhead included",
        *("arm", "bits", "x fp16", *_FIGURES, "<cls>, <eos>"),
    )
    exact = [preset.memory for preset in evaluation.presets if preset.options["codec"] == _EXACT]
    if evaluation.precision is not None:
        _arm(table, "full - reference", None, evaluation.precision)
    _arm(table, "frozen - full", exact[0] if exact else None, evaluation.frozen.leave_one_out)
    for preset in _compressed(evaluation):
        _arm(table, f"{preset.name} - frozen", preset.memory, preset.leave_one_out.against_frozen)
        _arm(table, f"{preset.name} - full", None, preset.leave_one_out.against_full)
    return table


def _arm(table: Table, name: str, memory: Memory | None, accuracy: TokenAccuracy) -> None:
    size = ("", "") if memory is None else (f"{memory.bits_per_element:.2f}", f"{memory.ratio_to_fp16:.2f}")
    table.add_row(name, *size, *_figures(accuracy.residues), f"{accuracy.special_tokens.cosine_mean:.5f}")


def _extend(evaluation: Evaluation) -> Table | None:
    frozen = evaluation.frozen.extend
    if not frozen:
        return None
    ws = dict.fromkeys(result.refreshed for result in frozen)
    title = "Extension by the last k residues, w of the context refreshed; cosine mean (1 %), KL mean; residues"
    table = _table(title, "arm", *(f"w = {w}" for w in ws))
    for k in dict.fromkeys(result.new_residues for result in frozen):
        at = [index for index, result in enumerate(frozen) if result.new_residues == k]
        first = evaluation.presets[0].extend[at[0]]
        skipped = f" ({first.skipped} too short)" if first.skipped else ""
        table.add_row(f"k = {k}, {counted(first.proteins, 'protein')}{skipped}")
        table.add_row("  frozen - full", *(_brief(frozen[i].against_full) for i in at))
        for preset in _compressed(evaluation):
            table.add_row(f"  {preset.name} - frozen", *(_brief(preset.extend[i].against_frozen) for i in at))
            table.add_row(f"  {preset.name} - full", *(_brief(preset.extend[i].against_full) for i in at))
        table.add_section()
    return table


def _groups(evaluation: Evaluation, kind: str) -> Table | None:
    """Leave-one-out by class, length or position; None if there is only one group."""
    presets = _compressed(evaluation)
    groups: list[Mapping[str, Accuracy]] = [getattr(preset.leave_one_out, f"by_{kind}") for preset in presets]
    if not groups or len(groups[0]) < 2:
        return None
    table = _table(f"Leave-one-out by {kind}: cosine mean (1 %); turbo - frozen, residues", kind, *groups[0])
    table.add_row("residues", *(f"{accuracy.tokens:,}" for accuracy in groups[0].values()))
    for preset, group in zip(presets, groups, strict=True):
        table.add_row(preset.name, *(_cosines(accuracy) for accuracy in group.values()))
    return table


def _layers(evaluation: Evaluation) -> Table | None:
    """Relative error of the hidden states by layer; of deep models, a selection of layers."""
    presets = _compressed(evaluation)
    if not presets or not presets[0].leave_one_out.by_layer:
        return None
    count = len(presets[0].leave_one_out.by_layer)
    shown = sorted({round(step * (count - 1) / max(1, _LAYERS - 1)) for step in range(_LAYERS)})
    title = "Leave-one-out by layer: relative RMS error of the hidden states; turbo - frozen, residues"
    table = _table(title, "layer", *(str(presets[0].leave_one_out.by_layer[i].layer) for i in shown))
    for preset in presets:
        layers = preset.leave_one_out.by_layer
        table.add_row(preset.name, *(_small(layers[i].relative_rms_error) for i in shown))
    return table


def _compressed(evaluation: Evaluation) -> list[PresetEvaluation]:
    return [preset for preset in evaluation.presets if preset.options["codec"] != _EXACT]


def _table(title: str, *columns: str) -> Table:
    table = text_table(title, columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.columns[0].no_wrap = True
    return table


def _figures(accuracy: Accuracy) -> Sequence[str]:
    return (
        f"{accuracy.cosine_mean:.5f}",
        f"{accuracy.cosine_q01:.4f}",
        f"{accuracy.cosine_min:.4f}",
        _small(accuracy.kl_mean),
        _small(accuracy.kl_q99),
        f"{accuracy.top1_agreement:.4f}",
        _small(accuracy.relative_rms_error),
    )


def _brief(accuracy: TokenAccuracy | None) -> str:
    return "-" if accuracy is None else f"{_cosines(accuracy.residues)} {_small(accuracy.residues.kl_mean)}"


def _cosines(accuracy: Accuracy) -> str:
    return f"{accuracy.cosine_mean:.4f} ({accuracy.cosine_q01:.3f})"


def _small(x: float) -> str:
    """Four decimals, or scientific notation with two digits for small numbers."""
    return f"{x:.4f}" if x >= 0.00095 or x == 0 else f"{x:.1e}"
