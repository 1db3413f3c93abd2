"""The calibration artifact: statistics of one model, and the codecs fitted to them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from esm_turbo.codecs import KVCodec, codec_class
from esm_turbo.codecs.fitting.statistics import KVStatistics
from esm_turbo.codecs.fitting.stored import from_tensors, to_tensors
from esm_turbo.codecs.fitting.transforms import inverted
from esm_turbo.config import PRODUCT_PRESETS, Geometry, TurboConfig
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.families import encoder_of
from esm_turbo.files.fingerprint import (
    HALF_RTOL,
    Fingerprint,
    attention_fingerprint,
    model_fingerprint,
    same_attention,
    same_model,
    same_weights,
)
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.files.quality import InaccuratePresetWarning, Quality
from esm_turbo.files.tabular import counted, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, FORMAT_VERSION)
# Tokens of the sample in a file, for the codebooks of other options: a quarter of what the presets are fitted to.
_SAVED_TOKENS = 256


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
        return self.fit([config])._codecs[config]

    def fit(
        self, presets: Iterable[str | TurboConfig] = PRODUCT_PRESETS, *, device: torch.device | None = None
    ) -> Self:
        """Fit the codecs of these presets now.

        Args:
            presets: those to fit.
            device: where samples are quantised, which takes most of the time; None, and one without float64, is the
                CPU, as is one without the memory. Results differ by the rounding of sums in float64.
        """
        on_cuda = device is not None and device.type == "cuda"
        statistics = replace(self.statistics, device=str(device)) if on_cuda else self.statistics
        missing: dict[type[KVCodec], list[TurboConfig]] = {}
        for config in dict.fromkeys(map(TurboConfig.from_preset, presets)):
            if config not in self._codecs:
                missing.setdefault(codec_class(config), []).append(config)
        for cls, configs in missing.items():
            # The factorisations are too small for threads to help.
            with threadpool_limits(1, user_api="blas"):
                try:
                    states = cls.fit_all(configs, statistics)
                except torch.OutOfMemoryError:
                    states = cls.fit_all(configs, self.statistics)
            for config, state in zip(configs, states, strict=True):
                self._codecs[config] = cls(config, self.geometry, state)
        return self

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that this calibration belongs to a model.

        Warns with an `OtherWeightsWarning` if it does, but was made before the model was fine-tuned or adapted or for
        other options, or if only the rounding of float16 may tell the weights apart.

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
        if self.weights is None:
            warnings.warn(
                "the calibration, of an earlier version, tells the model's attention alone, and not whether its other"
                " weights were fine-tuned since: calibrate again",
                OtherWeightsWarning,
                stacklevel=3,
            )
        elif not same_model(self.weights, weights, rounded=True):
            warnings.warn(
                "the calibration was made before the model was fine-tuned or adapted, or has other options: caches are"
                " less accurate than with a calibration of its own",
                OtherWeightsWarning,
                stacklevel=3,
            )
        elif not same_weights(self.weights, weights):
            warnings.warn(
                f"the calibration was made for weights of {self.provenance.get('model') or 'a model'} that agree with"
                f" the model's to {HALF_RTOL:g}, as after rounding to float16: calibrate again if it is another one",
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
        # The presets of the product need no more of the sample once they are fitted.
        complete = set(PRODUCT_PRESETS.values()) <= self._codecs.keys()
        tensors, counts = to_tensors(self.statistics, _SAVED_TOKENS if complete else None)
        tensors["fingerprint"] = torch.from_numpy(self.fingerprint)
        if self.weights is not None:
            tensors["weights"] = torch.from_numpy(self.weights)
        presets = {}
        for config, codec in self._codecs.items():
            presets[config.name] = config.to_dict()
            tensors |= {f"codec.{config.name}.{name}": tensor for name, tensor in codec.state.items()}
        tensors, copies = _without_copies(tensors)
        tensors, inverses = _without_inverses(tensors, copies)
        metadata = {
            "copies": copies,
            "inverses": inverses,
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
            tensors, metadata = read_artifact(path, "calibration", *READABLE_VERSIONS)
            for name, (kind, source) in metadata.get("inverses", {}).items():
                tensors[name] = _INVERSES[kind](tensors[source])
            tensors |= {name: tensors[original] for name, original in metadata["copies"].items()}
            geometry, found = Geometry(**metadata["geometry"]), tuple(tensors["moments.residues.keys.mean"].shape)
            if found != (geometry.num_layers, geometry.num_heads, geometry.head_dim):
                raise ValueError(f"moments {list(found)} are not of {geometry}")
            calibration = cls(
                from_tensors(tensors, metadata["counts"], geometry),
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


def _invert(matrix: Tensor) -> Tensor:
    with threadpool_limits(1, user_api="blas"):
        return torch.from_numpy(inverted(matrix.numpy()).astype(np.float32))


_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {"transposed": lambda x: x.mT.contiguous(), "inverted": _invert}


def _without_inverses(
    tensors: Mapping[str, Tensor], copies: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, str]]]:
    """Leave out inverses that can be computed; of each, how and of which tensor."""
    kept, computed = dict(tensors), {}
    for name in tensors:
        source = name.removesuffix("_inverse") + "_map"
        source = copies.get(source, source)
        if name.endswith("_inverse"):
            for kind, inverse in _INVERSES.items():
                if torch.equal(inverse(tensors[source]), tensors[name]):
                    computed[name] = kind, source
                    del kept[name]
                    break
    return kept, computed


def _fitted(
    tensors: Mapping[str, Tensor], presets: Mapping[str, Mapping[str, Any]]
) -> dict[TurboConfig, dict[str, Tensor]]:
    fitted: dict[TurboConfig, dict[str, Tensor]] = {}
    for name, options in presets.items():
        prefix = f"codec.{name}."
        state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        fitted[TurboConfig.from_dict(dict(options))] = state
    return fitted
