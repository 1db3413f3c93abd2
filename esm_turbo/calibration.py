"""The calibration artifact: statistics of one model, and the codecs fitted to them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from esm_turbo.codecs import KVCodec, codec_class
from esm_turbo.codecs.fitting.statistics import KVStatistics, Moments, Sensitivity, TokenMoments, TokenSample
from esm_turbo.config import PRODUCT_PRESETS, Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.families import encoder_of
from esm_turbo.files.fingerprint import (
    Fingerprint,
    attention_fingerprint,
    is_adapted,
    model_fingerprint,
    same_attention,
    same_model,
)
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.files.quality import InaccuratePresetWarning, Quality
from esm_turbo.files.tabular import counted, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT_VERSION = 1
_TOKEN_KINDS = ("residues", "specials")
_STATES = ("keys", "values")


class OtherWeightsWarning(UserWarning):
    """A calibration is used for a model whose weights have changed since, or that has adapters."""


class Calibration:
    """Statistics of one model's queries, keys and values, and the codecs fitted to them.

    Args:
        statistics: statistics from which codecs are fitted.
        fingerprint: of the model's attention weights, see `attention_fingerprint`: another model is refused.
        provenance: model id, counts, source of the proteins and package versions, as JSON values.
        fitted: states of fitted codecs by options; other codecs are fitted on first use.
        weights: of all weights, see `model_fingerprint`: other ones are warned about. None in older files.
        quality: accuracy of its presets as measured, see `evaluate.calibrated`; None if it was not.
    """

    def __init__(
        self,
        statistics: KVStatistics,
        fingerprint: Fingerprint,
        provenance: Mapping[str, Any],
        fitted: Mapping[TurboConfig, Mapping[str, Tensor]] | None = None,
        weights: Fingerprint | None = None,
        quality: Quality | None = None,
    ) -> None:
        self.statistics = statistics
        self.fingerprint = fingerprint
        self.weights = weights
        self.provenance = dict(provenance)
        self.quality = quality
        self._warned: set[TurboConfig] = set()
        self._codecs: dict[TurboConfig, KVCodec] = {}
        for config, state in (fitted or {}).items():
            self._codecs[config] = codec_class(config)(config, self.geometry, state)

    def __repr__(self) -> str:
        known = self.provenance
        counts = [counted(known[name], name[:-1]) for name in ("sequences", "residues") if name in known]
        return named(self, known.get("model", "a model"), self.geometry, *counts)

    @property
    def geometry(self) -> Geometry:
        """Geometry of the model."""
        return self.statistics.geometry

    @property
    def fitted(self) -> tuple[TurboConfig, ...]:
        """Options whose codecs are fitted."""
        return tuple(self._codecs)

    @property
    def nbytes(self) -> int:
        """Bytes of the fitted codecs' state, which all caches share."""
        return sum(t.numel() * t.element_size() for c in self._codecs.values() for t in c.state.values())

    def codec(self, preset: str | TurboConfig) -> KVCodec:
        """The codec of a preset, fitted on first use.

        Raises:
            ValueError: there is no such preset or codec, or the codec does not support this model.
        """
        config = TurboConfig.from_preset(preset)
        if config not in self._codecs:
            cls = codec_class(config)
            # The factorisations are too small for threads to help.
            with threadpool_limits(1, user_api="blas"):
                state = cls.fit(config, self.statistics)
            self._codecs[config] = cls(config, self.geometry, state)
        return self._codecs[config]

    def fit(self, presets: Iterable[str | TurboConfig] = PRODUCT_PRESETS) -> Self:
        """Fit the codecs of these presets now."""
        for preset in presets:
            self.codec(preset)
        return self

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that this calibration belongs to a model.

        Warns with an `OtherWeightsWarning` if it does, but was made before the model was fine-tuned or adapted.

        Args:
            model: an encoder or a model with one, of the library's classes or of this package's.

        Raises:
            ValueError: it belongs to another model.
        """
        geometry = Geometry.of(model.config)
        if difference := self.geometry.unlike(geometry):
            raise ValueError(f"the calibration is {difference}; {_REMEDY}")
        weights = model_fingerprint(encoder_of(model))
        if not same_attention(self.fingerprint, attention_fingerprint(weights, geometry.num_layers)):
            source = self.provenance.get("model", "another model")
            raise ValueError(f"the calibration was made for {source}: the weights are not this model's; {_REMEDY}")
        if is_adapted(weights) if self.weights is None else not same_model(self.weights, weights, rounded=True):
            warnings.warn(
                "the calibration was made before the model was fine-tuned or adapted: caches are less accurate than"
                " with a calibration of its own",
                OtherWeightsWarning,
                stacklevel=3,
            )

    def warn_if_inaccurate(self, preset: str | TurboConfig) -> None:
        """Warn, once, with an `InaccuratePresetWarning` of a preset that was measured to fall short."""
        config = TurboConfig.from_preset(preset)
        if self.quality is None or config in self._warned:
            return
        self._warned.add(config)
        if (shortfall := self.quality.shortfall(config.name)) is not None:
            warnings.warn(shortfall, InaccuratePresetWarning, stacklevel=3)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically."""
        statistics = self.statistics
        tensors = {"fingerprint": torch.from_numpy(self.fingerprint), "output_gram": _f32(statistics.output_gram)}
        if self.weights is not None:
            tensors["weights"] = torch.from_numpy(self.weights)
        tensors["inv_freq"] = _f32(statistics.inv_freq)
        tensors |= {f"sample.{name}": torch.from_numpy(array) for name, array in vars(statistics.sample).items()}
        for name in ("sample.keys", "sample.values"):
            tensors[name] = tensors[name].to(torch.bfloat16)
        for kind in _TOKEN_KINDS:
            tensors |= _arrays(f"moments.{kind}", getattr(statistics, kind))
        tensors |= _arrays("sensitivity", statistics.sensitivity)
        counts = {kind: getattr(statistics, kind).keys.count for kind in _TOKEN_KINDS}
        counts["sensitivity"] = statistics.sensitivity.count
        presets = {}
        for config, codec in self._codecs.items():
            presets[config.name] = config.to_dict()
            tensors |= {f"codec.{config.name}.{name}": tensor for name, tensor in codec.state.items()}
        tensors, copies = _without_copies(tensors)
        metadata = {
            "copies": copies,
            "geometry": self.geometry.to_dict(),
            "counts": counts,
            "presets": presets,
            "provenance": self.provenance,
        }
        if self.quality is not None:
            metadata["quality"] = self.quality.to_dict()
        write_artifact(path, "calibration", FORMAT_VERSION, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> Self:
        """Read a calibration.

        Args:
            path: a file written by `save`, or a folder that contains `calibration.safetensors`.
            model: if given, the calibration must belong to this model.

        Raises:
            ValueError: the file is missing, damaged, of another format version, or another model's.
        """
        path = Path(path)
        if path.is_dir():
            path = path / CALIBRATION_FILE
        try:
            tensors, metadata = read_artifact(path, "calibration", FORMAT_VERSION)
            tensors |= {name: tensors[original] for name, original in metadata["copies"].items()}
            geometry, found = Geometry(**metadata["geometry"]), tuple(tensors["moments.residues.keys.mean"].shape)
            if found != (geometry.num_layers, geometry.num_heads, geometry.head_dim):
                raise ValueError(f"moments {list(found)} are not of {geometry}")
            calibration = cls(
                _statistics(tensors, metadata),
                tensors["fingerprint"].numpy(),
                metadata["provenance"],
                _fitted(tensors, metadata["presets"]),
                tensors["weights"].numpy() if "weights" in tensors else None,
                Quality.from_dict(metadata["quality"]) if "quality" in metadata else None,
            )
            for codec in calibration._codecs.values():
                codec.layer_state(0, torch.device("cpu"))
        except ArtifactError as error:
            raise ArtifactError(f"{error}; {_REMEDY}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: an entry is missing or wrong: {error}; {_REMEDY}") from error
        if model is not None:
            calibration.check_model(model)
        return calibration


_REMEDY = "make one with `esm-turbo calibrate PROTEINS.fasta --model MODEL --out calibration.safetensors`"


def _without_copies(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Deduplicated tensors, and the name of the original of every copy: presets share their maps."""
    kept: dict[str, Tensor] = {}
    copies: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(tensors.items()):
        content = hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
        original = seen.setdefault((tensor.dtype, tuple(tensor.shape), content), name)
        if original == name:
            kept[name] = tensor
        else:
            copies[name] = original
    return kept, copies


def _f32(array: npt.NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _arrays(prefix: str, statistics: Any) -> dict[str, Tensor]:
    """The arrays of a dataclass and of the dataclasses in it; counts that are one number are metadata."""
    found: dict[str, Tensor] = {}
    for name, value in vars(statistics).items():
        if is_dataclass(value):
            found |= _arrays(f"{prefix}.{name}", value)
        elif isinstance(value, np.ndarray):
            found[f"{prefix}.{name}"] = _f32(value)
    return found


def _statistics(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> KVStatistics:
    def f64(name: str) -> npt.NDArray[np.float64]:
        return tensors[name].numpy().astype(np.float64)

    def moments(kind: str) -> TokenMoments:
        count = metadata["counts"][kind]
        return TokenMoments(
            *(Moments(count, f64(f"moments.{kind}.{s}.mean"), f64(f"moments.{kind}.{s}.covariance")) for s in _STATES)
        )

    def weighted(name: str) -> Moments:
        return Moments(*(f64(f"sensitivity.{name}.{part}") for part in ("count", "mean", "covariance")))

    sensitivity = Sensitivity(
        metadata["counts"]["sensitivity"],
        f64("sensitivity.key_mean"),
        weighted("keys"),
        weighted("values"),
        f64("sensitivity.queries"),
        f64("sensitivity.attention"),
    )
    sample = {field.name: tensors[f"sample.{field.name}"] for field in fields(TokenSample)}
    for name in ("keys", "values"):
        sample[name] = sample[name].float()
    return KVStatistics(
        Geometry(**metadata["geometry"]),
        moments("residues"),
        moments("specials"),
        sensitivity,
        TokenSample(**{name: tensor.numpy() for name, tensor in sample.items()}),
        f64("inv_freq"),
        f64("output_gram"),
    )


def _fitted(
    tensors: Mapping[str, Tensor], presets: Mapping[str, Mapping[str, Any]]
) -> dict[TurboConfig, dict[str, Tensor]]:
    fitted: dict[TurboConfig, dict[str, Tensor]] = {}
    for name, options in presets.items():
        prefix = f"codec.{name}."
        state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        fitted[TurboConfig.from_dict(dict(options))] = state
    return fitted
