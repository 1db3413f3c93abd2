"""Fingerprints: one calibration for a model in any dtype, and for no other model."""

import copy

import numpy as np
import pytest
import torch

from esm_turbo.files.families import encoder_of
from esm_turbo.files.fingerprint import (
    attention_fingerprint,
    model_fingerprint,
    same_attention,
    same_model,
)
from tests.helpers.e1 import make_e1
from tests.helpers.models import make_esm, make_esmc

MATRICES = ("query", "key", "value", "output")


@pytest.fixture
def model(tiny_esm):
    return tiny_esm(head_dim=16, heads=4, layers=3).esm


def weight(model, layer, matrix):
    attention = model.encoder.layer[layer].attention
    return (attention.output.dense if matrix == "output" else getattr(attention.self, matrix)).weight


@pytest.mark.parametrize("head_dim", [8, 24])
def test_shape_and_norms(tiny_esm, head_dim):
    model = tiny_esm(head_dim=head_dim, heads=2, layers=3).esm
    fingerprint = model_fingerprint(model)
    deciding = [name for name, _ in model.named_parameters() if not name.startswith(("pooler", "contact_head"))]
    # A row for the configuration and one for the rotary frequencies.
    assert fingerprint.shape == (len(deciding) + 2, 17)
    assert fingerprint.dtype == np.float32
    attention = attention_fingerprint(fingerprint, 3)
    assert attention.shape == (3, 4, 5)
    for layer in range(3):
        for index, matrix in enumerate(MATRICES):
            rounded = weight(model, layer, matrix).detach().bfloat16().double().numpy()
            norm = np.linalg.norm(rounded)
            assert attention[layer, index, 0] == pytest.approx(norm, rel=1e-5)
            signs = [
                np.random.Generator(np.random.PCG64(size)).integers(0, 2, (4, size)) * 2.0 - 1 for size in rounded.shape
            ]
            expected = np.einsum("ir,rc,ic->i", signs[0], rounded, signs[1]) / norm
            np.testing.assert_allclose(attention[layer, index, 1:], expected, atol=1e-4)


def test_projections_are_fixed(tiny_esm):
    one, other = (model_fingerprint(tiny_esm(head_dim=8, heads=2, layers=2).esm) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    # Random signs on both sides: about a unit normal variable for any matrix.
    parts = [attention_fingerprint(model_fingerprint(tiny_esm(layers=6, seed=s).esm), 6)[..., 1:] for s in range(3)]
    spread = np.concatenate(parts).ravel()
    assert 0.7 < spread.std() < 1.4
    assert abs(spread.mean()) < 0.25


def test_the_shipped_calibration_is_of_the_shipped_model(turbo):
    fingerprint = attention_fingerprint(model_fingerprint(turbo.model.esm), 12)
    assert same_attention(turbo.calibration.fingerprint, fingerprint)
    assert not same_attention(turbo.calibration.fingerprint[::-1], fingerprint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_are_the_same_model(model, dtype):
    expected = model_fingerprint(model)
    cast = copy.deepcopy(model).to(dtype)
    assert same_model(model_fingerprint(cast), expected)
    assert same_model(expected, model_fingerprint(cast))
    back = copy.deepcopy(cast).to(torch.float32)
    # Roundings to float16 are not those to bfloat16, and in float32 nothing tells that they happened.
    assert same_model(model_fingerprint(back), expected) is (dtype != torch.float16)


def test_embedded_model_in_half_precision_is_itself(turbo):
    # The shared model is not modified: a fingerprint depends on weights alone.
    expected = model_fingerprint(turbo.model.esm)
    for dtype in (torch.bfloat16, torch.float16):
        assert same_model(model_fingerprint(copy.deepcopy(turbo.model.esm).to(dtype)), expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_weights_are_another_model(tiny_esm, model, seed):
    assert not same_model(model_fingerprint(model), model_fingerprint(tiny_esm(layers=3, seed=seed).esm))


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("change", ["scaled", "negated", "noise", "heads swapped"])
def test_one_changed_matrix_is_another_model(model, matrix, layer, change):
    before = model_fingerprint(model)
    w = weight(model, layer, matrix)
    with torch.no_grad():
        if change == "scaled":
            w.mul_(1.03)
        elif change == "negated":
            w.neg_()
        elif change == "noise":
            w.add_(0.1 * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(0)))
        elif matrix == "output":
            w.copy_(torch.cat([w[:, 16:32], w[:, :16], w[:, 32:]], dim=1))
        else:
            w.copy_(torch.cat([w[16:32], w[:16], w[32:]]))
    assert not same_model(before, model_fingerprint(model))


def test_layers_in_another_order_are_another_model(model):
    before = model_fingerprint(model)
    with torch.no_grad():
        first, second = (weight(model, layer, "key") for layer in (0, 1))
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    assert not same_model(before, model_fingerprint(model))


def test_a_calibration_tolerates_more_than_rounding(model):
    before = model_fingerprint(model)
    with torch.no_grad():
        for layer in range(3):
            for matrix in MATRICES:
                weight(model, layer, matrix).mul_(1.002)
    after = model_fingerprint(model)
    assert not same_model(before, after)
    assert same_attention(attention_fingerprint(before, 3), attention_fingerprint(after, 3))


def test_other_shapes_are_another_model(model):
    fingerprint = model_fingerprint(model)
    assert not same_model(fingerprint, fingerprint[:2])
    assert not same_model(fingerprint, fingerprint[..., :-1])
    assert not same_model(fingerprint, fingerprint[0])


def test_nan_equals_nothing(model):
    fingerprint = model_fingerprint(model).copy()
    fingerprint[1, 2] = np.nan
    assert not same_model(fingerprint, model_fingerprint(model))
    assert not same_model(model_fingerprint(model), fingerprint)
    assert not same_model(fingerprint, fingerprint)


def test_zero_weights_have_a_fingerprint(model):
    with torch.no_grad():
        weight(model, 0, "key").zero_()
    fingerprint = model_fingerprint(model)
    assert np.isfinite(fingerprint).all()
    assert not fingerprint[2].any()
    assert same_model(fingerprint, fingerprint)


DECIDING = [
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.key.bias",
    "encoder.layer.1.attention.self.value.weight",
    "encoder.layer.1.attention.output.dense.bias",
    "encoder.layer.1.attention.LayerNorm.weight",
    "encoder.layer.0.intermediate.dense.weight",
    "encoder.layer.2.LayerNorm.bias",
    "encoder.layer.1.output.dense.weight",
]


@pytest.mark.parametrize("name", DECIDING)
@pytest.mark.parametrize("part", ["all", "first", "last", "column"])
def test_every_row_and_column_of_every_tensor_counts(model, name, part):
    before = model_fingerprint(model)
    parameter = model.get_parameter(name)
    with torch.no_grad():
        changed = {"all": parameter, "first": parameter[:1], "last": parameter[-1:], "column": parameter[..., 1:2]}[
            part
        ]
        changed.mul_(1.5).add_(0.01)
    after = model_fingerprint(model)
    assert not same_model(before, after)
    assert not same_model(before, model_fingerprint(copy.deepcopy(model).bfloat16()))


class Adapter(torch.nn.Module):
    """A low-rank adapter as in PEFT."""

    def __init__(self, base_layer, scaling=2.0):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base_layer.out_features, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)
        self.scaling = {"default": scaling}
        self.disable_adapters = False

    def forward(self, x):
        return self.base_layer(x) + self.scaling["default"] * self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("path", ["attention.self.key", "attention.self.query", "intermediate.dense"])
def test_adapters_make_another_model(model, path):
    """Whether they do anything yet or not; their scaling, weights and state count."""
    base = model_fingerprint(model)
    parent, _, name = path.rpartition(".")
    module = model.encoder.layer[1].get_submodule(parent)
    original = getattr(module, name)
    adapter = Adapter(original)
    setattr(module, name, adapter)
    seen = [base, model_fingerprint(model)]
    adapter.scaling["default"] = 1.0
    seen.append(model_fingerprint(model))
    adapter.disable_adapters = True
    seen.append(model_fingerprint(model))
    with torch.no_grad():
        adapter.lora_B.weight.fill_(0.01)
    seen.append(model_fingerprint(model))
    for index, one in enumerate(seen[1:], start=1):
        assert not any(same_model(one, other) for other in seen[:index])
    setattr(module, name, original)
    assert same_model(base, model_fingerprint(model))
    # As in `merge_and_unload`: the product is added through `.data`.
    original.weight.data += 0.1 * torch.outer(torch.ones(original.out_features), torch.ones(original.in_features))
    assert not same_model(base, model_fingerprint(model))


def test_what_has_no_fingerprint_is_refused(turbo):
    encoder = copy.deepcopy(turbo.model.esm)
    projections = encoder.encoder.layer[0].attention.self
    projections.query = torch.nn.Sequential(projections.query)
    with pytest.raises(ValueError, match="a projection of the attention is a Sequential, which has no weight"):
        model_fingerprint(encoder)
    encoder.encoder.layer[1] = torch.nn.Sequential(encoder.encoder.layer[1])
    with pytest.raises(ValueError, match="a layer of the encoder is not as ESM-2 has it"):
        model_fingerprint(encoder)
    del encoder.encoder.layer[0]
    with pytest.raises(ValueError, match="the encoder has 11 layers, but was built with 12; load the model again"):
        model_fingerprint(encoder)


def test_a_replaced_forward_makes_another_model(model):
    base = model_fingerprint(model)
    dense = model.encoder.layer[0].output.dense
    dense.forward = lambda x: torch.nn.functional.linear(x, dense.weight) * 2
    assert not same_model(base, model_fingerprint(model))
    del dense.forward
    assert same_model(base, model_fingerprint(model))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (make_esm, {"token_dropout": False}),
        (make_esm, {"layer_norm_eps": 1e-3}),
        (make_esmc, {"hidden_act": "gelu"}),
        (make_e1, {"clip_qkv": 1.0}),
        (make_e1, {"rms_norm_eps": 1e-2}),
    ],
)
def test_options_that_decide_numbers_make_another_model(make, option):
    one, other = (model_fingerprint(encoder_of(make(**options))) for options in ({}, option))
    assert not same_model(one, other)
