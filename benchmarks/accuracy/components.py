"""Errors of stored keys, values and scores by preset, accuracy by residue, and the paper's rotation under outliers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.ablation import PAPER_ABLATION
from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded, shipped_proteins
from benchmarks.harness.measure import Case, Figures
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import KVCodec
from esm_turbo.config import COMPARISON_PRESETS, PRODUCT_PRESETS, TurboConfig
from esm_turbo.evaluate.outliers import with_outliers
from esm_turbo.evaluate.protocols import Protein, leave_one_out
from esm_turbo.model.sessions import KVSession
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records

TOP = (1, 5, 10)
PLANTED = ((), *((("key",), scale) for scale in (10, 60, 200)), (("value",), 60), (("key", "value"), 60))
"""What is scaled in a model, and by how much; nothing in the first."""
CALIBRATION_PROTEINS = 60

_PAPER = PAPER_ABLATION["full"]
VARIANTS = {f"paper, {name}": PAPER_ABLATION[name] for name in ("shared LUT", "no rotation", "random Hadamard")}
PRESETS = {n: c for n, c in (PRODUCT_PRESETS | COMPARISON_PRESETS | VARIANTS).items() if n != "exact"}
ROTATIONS = {
    f"{transform}, scale per {scale}": replace(_PAPER, key_transform=transform, standardize=scale == "channel")
    for transform in ("svd", "identity", "hadamard")
    for scale in ("head", "channel")
}
"""The paper's codec by map of the keys, with one scale per head, or one per channel of keys and values."""


def preset_cases(tested: int = 60, max_proteins: int | None = None) -> Iterator[Case]:
    """One case and row per preset, with the shipped calibration."""
    proteins = evaluation_set("cath_val200", min(tested, max_proteins or tested))
    for name, config in PRESETS.items():
        yield _case(name, proteins, lambda name=name, config=config: _rows(embedded(), proteins, {name: config}))


def rotation_cases(tested: int = 20, max_proteins: int | None = None) -> Iterator[Case]:
    """One case per planted model, calibrated anew, with one row per variant of the paper's codec."""
    proteins = evaluation_set("cath_val200", min(tested, max_proteins or tested))
    for planted in PLANTED:
        kinds, scale = planted or ((), 1)
        name = f"{' and '.join(f'{kind}s' for kind in kinds)} x{scale}" if planted else "no outliers"

        def measure(kinds: Sequence[str] = kinds, scale: float = scale) -> list[Figures]:
            model = with_outliers(embedded().model, scale, kinds=kinds)
            turbo = TurboEsm(model, embedded().tokenizer)
            records = shipped_proteins()[:CALIBRATION_PROTEINS]
            calibration = calibrate_records(turbo, records, presets=ROTATIONS.values())
            model.set_turbo(calibration=calibration, preset="exact", backend=embedded().model.base_model.backend)
            about = {"planted": list(kinds), "scale": scale, "calibration_proteins": len(records)}
            return [row | about for row in _rows(turbo, proteins, ROTATIONS)]

        yield _case(name, proteins, measure)


@dataclass
class StoredErrors:
    """Sums over residues of a codec's errors, by layer and head; see `figures`."""

    codec: KVCodec
    sums: dict[str, np.ndarray]
    queries: int = 0

    @classmethod
    def of(cls, codec: KVCodec) -> StoredErrors:
        shape = codec.geometry.num_layers, codec.geometry.num_heads
        names = [f"{kind} {part}" for kind in ("key", "value", "score") for part in ("power", "error")]
        names += [f"top {k}" for k in TOP] + [f"{place} {n}" for place in ("channels", "stored") for n in range(5)]
        return cls(codec, {name: np.zeros(shape) for name in names})

    def add(self, layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Add a protein: query, keys and values of every layer, [1, H, n, D], with the special tokens at both ends."""
        for layer, (query, keys, values) in enumerate(layers):
            mask = torch.ones(keys.shape[:1] + keys.shape[2:3], dtype=torch.bool)
            if self.codec.config.protect_special_tokens:
                mask[:, [0, -1]] = False
            stored = self.codec.transform(layer, keys, values)
            packed = self.codec.quantize(layer, *stored)
            packed |= self.codec.summarize(layer, *stored, packed, mask)
            pairs = zip(("key", "value"), (keys, values), self.codec.decode(layer, packed), strict=True)
            exact, found = {}, {}
            for kind, before, after in pairs:
                exact[kind], found[kind] = before[0, :, 1:-1].double(), after[0, :, 1:-1].double()
            q = query[0, :, 1:-1].double()
            for of in (exact, found):
                scores = q @ of["key"].mT
                of["score"] = scores - scores.mean(-1, keepdim=True)
            for kind, x in exact.items():
                self._add(f"{kind} power", layer, (x**2).sum((1, 2)))
                self._add(f"{kind} error", layer, ((found[kind] - x) ** 2).sum((1, 2)))
            for k in TOP:
                best, ours = (of["score"].topk(k).indices for of in (exact, found))
                self._add(f"top {k}", layer, (best[..., None] == ours[..., None, :]).sum((1, 2, 3)) / k)
            for place, x in (("channels", exact["key"]), ("stored", stored[0][0, :, 1:-1].double())):
                for power in range(5):
                    self._add(f"{place} {power}", layer, (x**power).sum((1, 2)))
        self.queries += layers[0][0].shape[2] - 2

    def figures(self) -> Figures:
        """Signal to noise of keys, values and scores in dB (scores: of a query, without their mean), share of each
        query's k best keys that stay among the k best, and excess kurtosis of the keys' components, as the model has
        them and as they are quantised; means over layers and heads."""
        sums = self.sums
        return {
            "snr_db": {
                kind: float(10 * np.log10(sums[f"{kind} power"] / sums[f"{kind} error"]).mean())
                for kind in ("key", "value", "score")
            },
            "recall": {str(k): float(sums[f"top {k}"].mean() / self.queries) for k in TOP},
            "kurtosis": {place: float(self._kurtosis(place).mean()) for place in ("channels", "stored")},
            "draws": self.queries * sums["key power"].size,
        }

    def _kurtosis(self, place: str) -> np.ndarray:
        count, *raw = (self.sums[f"{place} {power}"] for power in range(5))
        m1, m2, m3, m4 = (x / count for x in raw)
        variance = m2 - m1**2
        return np.asarray((m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2 - 3)

    def _add(self, name: str, layer: int, by_head: Tensor) -> None:
        self.sums[name][layer] += by_head.numpy()


class _Recorder(KVSession):
    """Keeps the queries, keys and values of a forward pass."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append((query, keys, values))


@torch.no_grad()
def stored_errors(turbo: TurboEsm, proteins: Sequence[Protein], config: TurboConfig) -> Figures:
    """Errors of what a preset stores, over all layers and heads; see `StoredErrors.figures`."""
    errors = StoredErrors.of(turbo.model.base_model.codec(config))
    for protein in proteins:
        recorder, ids = _Recorder(), torch.tensor([protein.token_ids(turbo.codes)])
        turbo.model(ids, torch.ones_like(ids), kv_session=recorder)
        errors.add(recorder.layers)
    return errors.figures()


def _rows(turbo: TurboEsm, records: Sequence[ProteinRecord], configs: Mapping[str, TurboConfig]) -> list[Figures]:
    proteins = [Protein(record.id, record.sequence) for record in records]
    arms = leave_one_out(turbo, proteins, configs, lambda done: None, layers=False)
    rows = []
    for name, config in configs.items():
        comparison = arms.turbo_frozen[name]
        errors, positions = comparison.residues, comparison.positions
        residue = np.array([p.sequence[i - 1] for p, i in zip(comparison.proteins, positions, strict=True)])
        rows.append({
            "preset": name,
            "proteins": len(proteins),
            "residues": rounded(dataclasses.asdict(errors.accuracy())),
            "by_residue": {
                letter: rounded(dataclasses.asdict(errors[residue == letter].accuracy()))
                for letter in sorted(set(residue))
            },
            "stored": rounded(stored_errors(turbo, proteins, config)),
        })  # fmt: skip
    return rows


def _case(name: str, proteins: Sequence[ProteinRecord], measure: Callable[[], list[Figures]]) -> Case:
    return Case(
        name=name,
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "set": "cath_val200.fasta", "tested": len(proteins)},
        check=lambda: exactness(proteins[0]),
        measure=lambda repeats: measure(),
    )
