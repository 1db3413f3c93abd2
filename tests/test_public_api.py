"""The public names, their signatures as documented, and that all of them are explained."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import transformers

import esm_turbo
from esm_turbo import (
    Calibration,
    KVCalibrator,
    TurboConfig,
    TurboEsm,
    TurboEsmForMaskedLM,
    TurboEsmModel,
    TurboEsmSelfAttention,
    TurboKVCache,
)
from esm_turbo.config import PRESETS

NAMES = [
    "TurboEsm",
    "TurboEsmModel",
    "TurboEsmForMaskedLM",
    "TurboEsmSelfAttention",
    "TurboConfig",
    "TurboKVCache",
    "KVCalibrator",
    "Calibration",
]


CLASSES_FOR_FILES = ["ContextStore", "EmbeddingRequest", "Workers"]
FUNCTIONS = ["calibrate_records", "embed_records", "iter_embeddings", "read_embedding", "read_fasta", "read_homologs"]


def test_names() -> None:
    assert set(esm_turbo.__all__) >= {*NAMES, *CLASSES_FOR_FILES, *FUNCTIONS, "__version__"}
    assert set(esm_turbo.__all__) <= set(dir(esm_turbo))
    for name in FUNCTIONS:
        assert inspect.isfunction(getattr(esm_turbo, name))
        assert getattr(esm_turbo, name).__name__ == name
    for name in [*NAMES, *CLASSES_FOR_FILES]:
        assert inspect.isclass(getattr(esm_turbo, name))
        assert getattr(esm_turbo, name).__name__ == name
        assert getattr(esm_turbo, name).__module__.startswith("esm_turbo.")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", esm_turbo.__version__)
    with pytest.raises(AttributeError, match="no attribute 'turbo'"):
        _ = esm_turbo.turbo


def test_what_they_are() -> None:
    assert issubclass(TurboEsmModel, transformers.EsmModel)
    assert issubclass(TurboEsmForMaskedLM, transformers.EsmForMaskedLM)
    assert issubclass(TurboEsmSelfAttention, transformers.models.esm.modeling_esm.EsmSelfAttention)
    assert issubclass(TurboKVCache, transformers.Cache)
    assert {"exact", "paper"} <= set(PRESETS)
    assert all(isinstance(config, TurboConfig) and config.name == name for name, config in PRESETS.items())


# Parameters in order, with their defaults; a star alone begins those by keyword only. More may follow.
SIGNATURES: dict[Any, str] = {
    TurboEsm.from_pretrained: (
        "model=None, *, calibration=None, preset=None, device=None, dtype=None, precision=None, backend='auto',"
        " device_map=None"
    ),
    TurboEsm.save_pretrained: "folder",
    TurboEsm.embed: (
        "sequences, repr_layers=(-1,), include=('mean', 'per_tok'), toks_per_batch=None, return_cache=False"
    ),
    TurboEsm.prefill: "sequences, total_tokens=None, total_masks=None",
    TurboEsm.extend: "cache, sequences, eos=True, refresh=8, append=False",
    TurboEsm.evaluate: "sequences, presets=None, max_proteins=None",
    KVCalibrator: "model",
    KVCalibrator.partial_fit: "input_ids, attention_mask",
    KVCalibrator.finalize: "",
    Calibration.save: "path",
    Calibration.load: "path, model=None",
    TurboKVCache.get_seq_length: "",
    TurboKVCache.crop: "",
    TurboKVCache.reorder_cache: "beam_idx",
    TurboKVCache.batch_repeat_interleave: "repeats",
    TurboKVCache.batch_select_indices: "indices",
    TurboKVCache.cat: "caches",
    TurboKVCache.to: "device",
    TurboKVCache.save: "path",
    TurboKVCache.load: "path, device=None, model=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function: Any) -> None:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "turbo")]
    keyword_only, index = False, 0
    for wanted in re.split(r", (?![^(]*\))", SIGNATURES[function]):
        name, _, default = wanted.partition("=")
        if name in ("", "*"):
            keyword_only |= name == "*"
            continue
        parameter = parameters[index]
        index += 1
        assert parameter.name == name
        assert (parameter.kind is parameter.KEYWORD_ONLY) == keyword_only
        if default:
            assert parameter.default == eval(default)
    for parameter in parameters[index:]:
        optional = parameter.default is not parameter.empty
        assert optional or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not wanted


@pytest.mark.parametrize("model", [TurboEsmModel, TurboEsmForMaskedLM])
def test_model_signatures(model: type) -> None:
    """Hugging Face's arguments in their order, and the cache's by keyword."""
    ours = inspect.signature(model.forward).parameters
    esm = next(base for base in model.__mro__ if base.__module__.startswith("transformers.models.esm"))
    theirs = [
        name
        for name, p in inspect.signature(esm.forward).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD and not name.startswith("encoder")
    ]
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == theirs
    for name in ("past_key_values", "use_cache"):
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default is None
    loading = inspect.signature(model.from_pretrained).parameters
    assert loading["calibration"].default is None
    # None is `turbo3`, told apart from a `turbo3` that is asked for.
    assert loading["preset"].default is None


def public_members() -> list[Any]:
    members: list[Any] = []
    for name in FUNCTIONS:
        members.append(pytest.param(getattr(esm_turbo, name), id=name))
    for name in [*NAMES, *CLASSES_FOR_FILES]:
        owner = getattr(esm_turbo, name)
        members.append(pytest.param(owner, id=name))
        for member, value in vars(owner).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if not member.startswith("_") and inspect.isfunction(function):
                members.append(pytest.param(function, id=f"{name}.{member}"))
    return members


@pytest.mark.parametrize("member", public_members())
def test_everything_public_is_explained(member: Any) -> None:
    inherited = getattr(transformers.Cache, member.__name__, None) or getattr(
        transformers.EsmModel, member.__name__, None
    )
    assert member.__doc__ or inherited or member.__name__ in ("to_dict", "to_json")
