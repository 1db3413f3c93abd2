"""Options: what is allowed, names, and the way to a file and back."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EsmConfig

from esm_turbo.config import PRESETS, Geometry, TurboConfig

ALLOWED = {
    "bits": [1, 2, 3, 4, 5, 6, 7],
    "protect_special_tokens": [False, True],
    "seed": [0, 1, 2**40],
}
CONFIGS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in ALLOWED.items()})


@settings(deadline=None)
@given(CONFIGS)
def test_round_trip_through_json(options):
    config = TurboConfig(**options)
    text = config.to_json()
    again = TurboConfig.from_dict(json.loads(text))
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == text
    assert again.name == config.name


@settings(deadline=None)
@given(CONFIGS, CONFIGS)
def test_names_are_equal_exactly_where_options_are(a, b):
    a, b = TurboConfig(**a), TurboConfig(**b)
    assert (a.name == b.name) == (a == b) == (a.to_json() == b.to_json())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_names(name):
    config = TurboConfig.from_preset(name)
    assert config.name == name
    assert config is PRESETS[name]
    assert TurboConfig.from_preset(config) is config
    assert TurboConfig.from_dict(config.to_dict()) == config


def test_paper_preset_is_the_papers_method():
    assert PRESETS["paper"].to_dict() == {
        **PRESETS["paper"].to_dict(),
        "codec": "lut",
        "bits": 3,
        "key_transform": "svd",
        "value_transform": "identity",
        "standardize": False,
        "sign_correction": "keys_and_values",
        "shared_codebook": False,
        "protect_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bits", value) for value in (0, 8, -3, 3.0, True, "3", None)),
        *(("protect_special_tokens", value) for value in (1.0, None)),
        *(("seed", value) for value in (-1, 0.5, "0", True, None)),
        *(("codec", value) for value in (None, 3, ["lut"])),
    ],
)
def test_values_that_are_not_allowed(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be .*got "):
        TurboConfig(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be .*got "):
        TurboConfig.from_dict({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key_transform", "hadamard"),
        ("value_transform", "hadamard"),
        ("standardize", True),
        ("sign_correction", "none"),
        ("shared_codebook", True),
    ],
)
def test_files_of_earlier_versions_load_unless_an_option_has_gone(name, value):
    """They name all options, and digests are taken of these."""
    former = PRESETS["paper"].to_dict()
    assert TurboConfig.from_dict(former) == PRESETS["paper"]
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*got {value!r}"):
        TurboConfig.from_dict(former | {name: value})
    assert hashlib.sha256(TurboConfig(bits=5).to_json().encode()).hexdigest()[:12] == "9fca4459f4bf"


def test_options_of_a_newer_version_are_named():
    with pytest.raises(ValueError, match=r"\['entropy_coding', 'x'\].*newer version"):
        TurboConfig.from_dict({"bits": 3, "x": 1, "entropy_coding": True})


@pytest.mark.parametrize("preset", ["turbo99", "Paper", "", None, 3, ["paper"]])
def test_unknown_presets(preset):
    with pytest.raises(ValueError, match=r"`preset` must be one of exact, paper, turbo4.*, or another of .*, got"):
        TurboConfig.from_preset(preset)


def test_a_preset_that_is_nearly_one_is_suggested():
    with pytest.raises(ValueError, match=r"got 'turboquant_prd4'; did you mean turboquant_prod4\?$"):
        TurboConfig.from_preset("turboquant_prd4")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        TurboConfig.from_preset("xyz")


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "elements"),
    [(6, 20, 16, 3840), (12, 20, 24, 11520), (33, 20, 64, 84480), (48, 40, 128, 491520)],
)
def test_geometry_of_published_models(layers, heads, head_dim, elements):
    config = EsmConfig(hidden_size=heads * head_dim, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=33)
    geometry = Geometry.of(config)
    assert geometry == Geometry(num_layers=layers, num_heads=heads, head_dim=head_dim)
    assert geometry.elements_per_token == elements
    assert str(geometry) == f"{layers} layers x {heads} heads x {head_dim}"
