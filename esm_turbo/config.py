"""Options of a cache, the presets built from them, and the backends."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any

# Options of earlier versions, which files go on naming; the paper's values are the only ones left.
_FORMER: dict[str, Any] = {
    "key_transform": "svd",
    "value_transform": "identity",
    "standardize": False,
    "sign_correction": "keys_and_values",
    "shared_codebook": False,
}


class Backend(enum.StrEnum):
    """Implementation of the packed attention.

    `auto` picks the fastest one that can run and is the only one that falls back; the others raise where they cannot
    run.
    """

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"
    REFERENCE = "reference"


# Files of before there were other families do not name theirs.
_UNNAMED_TYPE = "esm"


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's keys and values, and whose they are.

    Attributes:
        num_layers: transformer layers whose keys and values are stored.
        num_heads: attention heads per layer, of keys and values as of queries.
        head_dim: components per head.
        model_type: of the model's family, as in config.json.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    model_type: str = _UNNAMED_TYPE

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Geometry of a model with this configuration."""
        return cls(
            num_layers=getattr(config, "num_cached_layers", config.num_hidden_layers),
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            model_type=config.model_type,
        )

    def to_dict(self) -> dict[str, Any]:
        """As in files, which name the model type of ESM-2 by its absence."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value != _UNNAMED_TYPE}

    def unlike(self, model: Geometry) -> str | None:
        """The difference of this geometry from a model's, to follow "the cache is"; None if there is none."""
        if self == model:
            return None
        if self.model_type != model.model_type:
            return f"for model type {self.model_type!r}, the model is {model.model_type!r}"
        return f"for {self}, the model has {model}"

    @property
    def elements_per_token(self) -> int:
        """Key and value components per token, over all layers and heads."""
        return 2 * self.num_layers * self.num_heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.num_layers} layers x {self.num_heads} heads x {self.head_dim}"


@dataclass(frozen=True)
class TurboConfig:
    """Options of a compressed cache. A preset is a named instance.

    The defaults are the TurboESM paper's method (arXiv:2603.26110, section 3 and algorithm 1).

    Attributes:
        codec: quantisation method: `exact` (full precision), `lut` (look-up tables), `turbo` (bit allocation), or a
            comparison codec, see `codecs.CODECS`.
        mean_bits: for `turbo`, bits per element averaged over keys and values, 1 to 4.
        bits: for `lut`, bits per index into the look-up table, 1 to 7, beside a sign; for comparison codecs, bits per
            component.
        protect_special_tokens: keep keys and values of `<cls>` and `<eos>` in bfloat16.
        seed: seed of the random transforms.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    codec: str = "lut"
    mean_bits: int = 3
    bits: int = 3
    protect_special_tokens: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.codec, str):
            raise ValueError(f"`codec` must be the name of a codec, got {self.codec!r}")
        _check("mean_bits", self.mean_bits, range(1, 5))
        _check("bits", self.bits, range(1, 8))
        _check("protect_special_tokens", self.protect_special_tokens, (False, True))
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"`seed` must be an integer of at least 0, got {self.seed!r}")

    @classmethod
    def from_preset(cls, preset: str | TurboConfig) -> TurboConfig:
        """The options of a named preset; a `TurboConfig` is returned unchanged.

        Raises:
            ValueError: no preset has that name.
        """
        if isinstance(preset, TurboConfig):
            return preset
        if not isinstance(preset, str) or preset not in PRESETS:
            near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.5) if isinstance(preset, str) else []
            hint = f"; did you mean {near[0]}?" if near else ""
            known = f"{', '.join(PRODUCT_PRESETS)}, or another of docs/concepts.md"
            raise ValueError(f"`preset` must be one of {known}, got {preset!r}{hint}")
        return PRESETS[preset]

    @property
    def name(self) -> str:
        """The preset's name, or `custom-` followed by a digest of the options."""
        for name, config in PRESETS.items():
            if config == self:
                return name
        return "custom-" + hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | _FORMER

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> TurboConfig:
        """Inverse of `to_dict`.

        Raises:
            ValueError: an option is unknown, as from a newer version, or has a value that is not allowed, or no longer.
        """
        for name, value in _FORMER.items():
            _check(name, options.get(name, value), (value,))
        options = {name: value for name, value in options.items() if name not in _FORMER}
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option(s) {unknown}: written by a newer version of esm_turbo?")
        return cls(**options)


def _check(name: str, value: Any, allowed: Any) -> None:
    # 3.0 equals 3 and 1 equals True, but files store the options with their types.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}")


PRODUCT_PRESETS: dict[str, TurboConfig] = {
    "exact": TurboConfig(codec="exact"),
    "paper": TurboConfig(),
    **{
        f"turbo{bits}": TurboConfig(codec="turbo", mean_bits=bits, protect_special_tokens=True) for bits in (4, 3, 2, 1)
    },
}
COMPARISON_PRESETS: dict[str, TurboConfig] = {
    **{f"turboquant{bits}": TurboConfig(codec="turboquant", bits=bits) for bits in (4, 3, 2)},
    **{f"turboquant_prod{bits}": TurboConfig(codec="turboquant_prod", bits=bits) for bits in (4, 3)},
    "tq35": TurboConfig(codec="hybrid", bits=4),
    "tq25": TurboConfig(codec="hybrid", bits=3),
    **{f"polarquant{bits}": TurboConfig(codec="polarquant", bits=bits) for bits in (4, 3)},
    **{name: TurboConfig(codec=name, bits=2) for name in ("qjl", "qjl_outliers")},
    **{name: TurboConfig(codec=name, bits=4) for name in ("spectral", "spectral_layers")},
    "spectral8": TurboConfig(codec="spectral8"),
    "fp8": TurboConfig(codec="fp8"),
    "int8": TurboConfig(codec="int8"),
    "int4": TurboConfig(codec="int4"),
    **{f"kivi{bits}": TurboConfig(codec="kivi", bits=bits) for bits in (4, 2)},
}
"""Other methods, for comparison; calibration fits them on first use only."""

PRESETS = PRODUCT_PRESETS | COMPARISON_PRESETS

DEFAULT_PRESET = "turbo3"

DEFAULT_REFRESH = 8
"""Cached residues that run again beside new or masked ones; chosen by measurement, see docs/concepts.md."""

DEFAULT_CONTEXT_TOKENS = 7168
"""Budget of a context that is drawn from a family, in residues of its homologs."""

DEFAULT_MAX_SIMILARITY = 0.95
"""Largest share of a protein's residues that a homolog in a drawn context has."""

DEFAULT_TOKS_PER_BATCH = 4096
"""Padded tokens per batch of whole proteins; see `tasks.common.forwards.protein_tokens` for CUDA."""
