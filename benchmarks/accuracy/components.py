"""What codecs lose of keys, values and scores: by preset, by layer and size of the calibration, and under outliers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.harness.embedded import embedded, evaluation_set, exactness, rounded, shipped_proteins
from benchmarks.harness.measure import Case, Figures
from benchmarks.harness.names import COMPRESSED
from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import KVCodec
from esm_turbo.codecs.peers.spectral import retained_energy
from esm_turbo.config import COMPARISON_PRESETS, PRESETS, PRODUCT_PRESETS, TurboConfig
from esm_turbo.evaluate.protocols import Protein, leave_one_out
from esm_turbo.files.families import projections_of
from esm_turbo.model.sessions import KVSession
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.calibration.records import calibrate_records

Array = npt.NDArray[np.float64]
Layers = list[tuple[Tensor, Tensor, Tensor]]
"""Query, keys and values of every layer, [1, H, n, D] each, with the special tokens at both ends."""

ENERGY = "energy of keys"
PLANTS = {
    "outliers x1": (("key", "value"), 1),
    "keys x10": (("key",), 10),
    "keys x60": (("key",), 60),
    "outliers x10": (("key", "value"), 10),
    "outliers x60": (("key", "value"), 60),
}
"""Channels that are planted and their factor, by case."""
PLANTED = (
    *COMPRESSED,
    "fp8", "int4", "kivi4", "kivi2", "qjl_outliers", "qjl", "spectral_layers", "spectral8", "spectral",
)  # fmt: skip
SIZES = (10, 60, 640)
"""Proteins of a calibration."""
BY_LAYER = ("paper", "turbo3")

_TOP = (1, 5, 10)
_DOMAINS, _FEWER, _FEWEST = 60, 20, 8
_PLANTED_CALIBRATION = 60


def preset_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case for each preset, with the shipped calibration, and one of how the energy of keys is distributed."""
    proteins = evaluation_set("cath_val200", min(_DOMAINS, max_proteins or _DOMAINS))
    for name in [name for name in PRODUCT_PRESETS | COMPARISON_PRESETS if name != "exact"]:

        def measure(name: str = name) -> Figures:
            [errors] = _errors(embedded(), proteins, [PRESETS[name]])
            return {"preset": name, "proteins": len(proteins), "stored": rounded(errors.figures())}

        yield _case(name, proteins, measure)

    def energy() -> Figures:
        held = np.zeros(1)
        for protein in proteins:
            layers = _run(embedded(), protein)
            held = held + np.stack([retained_energy(keys[0, :, 1:-1].numpy()).sum((0, 1)) for _, keys, _ in layers])
        return {"proteins": len(proteins), "retained_energy": rounded((held / held[:, -1:]).tolist())}

    yield _case(ENERGY, proteins, energy)


def calibration_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case for each size of a calibration: signal to noise of scores and values by layer."""
    proteins = evaluation_set("cath_val200", min(_FEWER, max_proteins or _FEWER))
    configs = {name: PRESETS[name] for name in BY_LAYER}
    for size in SIZES:

        def measure(size: int = size) -> Figures:
            chosen = shipped_proteins()[:size]
            # The shipped calibration is that of all.
            whole = len(chosen) == len(shipped_proteins())
            turbo = embedded() if whole else _calibrated(embedded().model, chosen, configs)
            found = zip(configs, _errors(turbo, proteins, list(configs.values())), strict=True)
            presets = {name: {kind: errors.snr(kind).mean(1).tolist() for kind in _KINDS} for name, errors in found}
            return {"calibration_proteins": size, "proteins": len(proteins), "snr_db": rounded(presets)}

        yield _case(f"{size} proteins", proteins, measure)


def outlier_cases(max_proteins: int | None = None) -> Iterator[Case]:
    """One case for each of `PLANTS`, with a row for each preset: leave-one-out."""
    proteins = evaluation_set("cath_val200", min(_FEWEST, max_proteins or _FEWEST))
    configs = {name: PRESETS[name] for name in PLANTED}
    for case, (kinds, scale) in PLANTS.items():

        def measure(kinds: Sequence[str] = kinds, scale: float = scale) -> list[Figures]:
            planted = with_outliers(embedded().model, scale, kinds)
            turbo = _calibrated(planted, shipped_proteins()[:_PLANTED_CALIBRATION], configs)
            chosen = [Protein(record.id, record.sequence) for record in proteins]
            arms = leave_one_out(turbo, chosen, configs, lambda done: None, layers=False)
            found = {name: asdict(arms.turbo_frozen[name].residues.accuracy()) for name in configs}
            return [{"preset": name, "scale": scale, "residues": rounded(errors)} for name, errors in found.items()]

        yield _case(case, proteins, measure)


def with_outliers(
    model: TurboEsmForMaskedLM, scale: float, kinds: Sequence[str] = ("key", "value"), seed: int = 0
) -> TurboEsmForMaskedLM:
    """A copy of a model of ESM-2 that computes the same, with two channels of the keys or values of every head scaled.

    Scaling a RoPE pair of key channels by a and the pair of query channels by 1 / a preserves every score, and scaling
    value channels by a and the columns of the output projection by 1 / a every output.
    """
    planted = copy.deepcopy(model, {id(model.base_model.calibration): None})
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    first = np.random.default_rng(seed).integers(
        0, head_dim // 2, (config.num_hidden_layers, 2, config.num_attention_heads)
    )
    first = first + head_dim * np.arange(config.num_attention_heads)
    channels = torch.from_numpy(np.concatenate([first, first + head_dim // 2], axis=-1))
    with torch.no_grad():
        for layer, (of_keys, of_values) in zip(projections_of(planted.base_model), channels, strict=True):
            query, key, value, output = layer
            if "key" in kinds:
                _scale(key, of_keys, scale)
                _scale(query, of_keys, 1 / scale)
            if "value" in kinds:
                _scale(value, of_values, scale)
                output.weight[:, of_values] /= scale
    return planted


def _scale(linear: nn.Linear, rows: Tensor, factor: float) -> None:
    for parameter in linear.parameters():
        parameter[rows] *= factor


_KINDS = ("key", "value", "score")


@dataclass
class StoredErrors:
    """Sums over residues of a codec's errors, [layers, heads] each; see `figures`."""

    codec: KVCodec
    sums: dict[str, Array]
    queries: int = 0

    @classmethod
    def of(cls, codec: KVCodec) -> StoredErrors:
        shape = codec.geometry.num_layers, codec.geometry.num_heads
        names = [f"{kind} {part}" for kind in _KINDS for part in ("power", "error")]
        names += [f"top {k}" for k in _TOP] + [f"{place} {n}" for place in ("channels", "stored") for n in range(5)]
        return cls(codec, {name: np.zeros(shape) for name in names})

    def add(self, layers: Layers) -> None:
        """Add a protein."""
        for layer, (query, keys, values) in enumerate(layers):
            mask = torch.ones(keys.shape[:1] + keys.shape[2:3], dtype=torch.bool)
            if self.codec.config.protect_special_tokens:
                mask[:, [0, -1]] = False
            stored = self.codec.transform(layer, keys, values)
            packed = self.codec.quantize(layer, *stored)
            packed |= self.codec.summarize(layer, *stored, packed, mask)
            read = self.codec.decode(layer, packed)
            exact, found = (
                {kind: x[0, :, 1:-1].double() for kind, x in zip(_KINDS, pair, strict=False)}
                for pair in ((keys, values), read)
            )
            q = query[0, :, 1:-1].double()
            for of in (exact, found):
                scores = q @ of["key"].mT
                of["score"] = scores - scores.mean(-1, keepdim=True)
            for kind, x in exact.items():
                self._add(f"{kind} power", layer, x.square().sum((1, 2)))
                self._add(f"{kind} error", layer, (found[kind] - x).square().sum((1, 2)))
            for k in _TOP:
                best, ours = (of["score"].topk(k).indices for of in (exact, found))
                self._add(f"top {k}", layer, (best[..., None] == ours[..., None, :]).sum((1, 2, 3)) / k)
            for place, x in (("channels", exact["key"]), ("stored", stored[0][0, :, 1:-1].double())):
                for power in range(5):
                    self._add(f"{place} {power}", layer, (x**power).sum((1, 2)))
        self.queries += layers[0][0].shape[2] - 2

    def snr(self, kind: str) -> Array:
        """Signal to noise of keys, values or scores (of a query, without their mean) in dB, [layers, heads]."""
        return np.asarray(10 * np.log10(self.sums[f"{kind} power"] / self.sums[f"{kind} error"]))

    def figures(self) -> Figures:
        """Signal to noise, share of each query's k best keys that stay among the k best, and excess kurtosis of the
        keys' components, as the model has them and as they are quantised; means over layers and heads."""
        return {
            "snr_db": {kind: float(self.snr(kind).mean()) for kind in _KINDS},
            "recall": {str(k): float(self.sums[f"top {k}"].mean() / self.queries) for k in _TOP},
            "kurtosis": {place: float(self._kurtosis(place).mean()) for place in ("channels", "stored")},
            "draws": self.queries * self.sums["key power"].size,
        }

    def _kurtosis(self, place: str) -> Array:
        count, *raw = (self.sums[f"{place} {power}"] for power in range(5))
        m1, m2, m3, m4 = (x / count for x in raw)
        variance = m2 - m1**2
        return np.asarray((m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2 - 3)

    def _add(self, name: str, layer: int, by_head: Tensor) -> None:
        self.sums[name][layer] += by_head.numpy()


class _Recorder(KVSession):
    """Keeps the queries, keys and values of a forward."""

    def __init__(self) -> None:
        self.layers: Layers = []

    def attend(self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.layers.append((query, keys, values))


@torch.no_grad()
def _run(turbo: TurboEsm, protein: ProteinRecord) -> Layers:
    recorder = _Recorder()
    ids = torch.tensor([Protein(protein.id, protein.sequence).token_ids(turbo.codes)])
    turbo.model(ids, torch.ones_like(ids), kv_session=recorder)
    return recorder.layers


def _errors(turbo: TurboEsm, proteins: Sequence[ProteinRecord], configs: Sequence[TurboConfig]) -> list[StoredErrors]:
    found = [StoredErrors.of(turbo.model.base_model.codec(config)) for config in configs]
    for protein in proteins:
        layers = _run(turbo, protein)
        for errors in found:
            errors.add(layers)
    return found


def _calibrated(
    model: TurboEsmForMaskedLM, proteins: Sequence[ProteinRecord], configs: Mapping[str, TurboConfig]
) -> TurboEsm:
    """The model with a calibration of its own on these proteins."""
    copied = copy.deepcopy(model, {id(model.base_model.calibration): None})
    turbo = TurboEsm(copied, embedded().tokenizer)
    copied.set_turbo(calibration=calibrate_records(turbo, proteins, presets=configs.values()))
    return turbo


def _case(name: str, proteins: Sequence[ProteinRecord], measure: Callable[[], Figures | list[Figures]]) -> Case:
    return Case(
        name=name,
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "set": "cath_val200.fasta", "tested": len(proteins)},
        check=lambda: exactness(proteins[0]),
        measure=lambda repeats: measure(),
    )
