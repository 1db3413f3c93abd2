"""Fingerprints: one model in any dtype, and no other model."""

import copy

import numpy as np
import pytest
import torch

from esm_turbo.files.fingerprint import model_fingerprint, same_model

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
    assert fingerprint.shape[:2] == (3, 4)
    assert fingerprint.shape[2] > 1
    assert fingerprint.dtype == np.float32
    for layer in range(3):
        for index, matrix in enumerate(MATRICES):
            norm = np.linalg.norm(weight(model, layer, matrix).detach().double().numpy())
            assert fingerprint[layer, index, 0] == pytest.approx(norm, rel=1e-5)


def test_projections_are_fixed(tiny_esm):
    one, other = (model_fingerprint(tiny_esm(head_dim=8, heads=2, layers=2).esm) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    # Random signs on both sides: about a unit normal variable for any matrix.
    spread = np.concatenate([model_fingerprint(tiny_esm(layers=6, seed=s).esm)[..., 1:].ravel() for s in range(3)])
    assert 0.7 < spread.std() < 1.4
    assert abs(spread.mean()) < 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_are_the_same_model(model, dtype):
    expected = model_fingerprint(model)
    cast = copy.deepcopy(model).to(dtype)
    assert same_model(model_fingerprint(cast), expected)
    assert same_model(expected, model_fingerprint(cast))
    back = copy.deepcopy(cast).to(torch.float32)
    assert same_model(model_fingerprint(back), expected)


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


def test_rounding_within_the_tolerance_is_the_same_model(model):
    before = model_fingerprint(model)
    with torch.no_grad():
        for layer in range(3):
            for matrix in MATRICES:
                weight(model, layer, matrix).mul_(1.002)
    assert same_model(before, model_fingerprint(model))


def test_an_in_place_change_is_detected(model):
    before = model_fingerprint(model)
    assert model_fingerprint(model) is before
    with torch.no_grad():
        weight(model, 1, "key").mul_(2)
    assert not same_model(before, model_fingerprint(model))


def test_loading_other_weights_is_detected(tiny_esm, model):
    before = model_fingerprint(model)
    model.load_state_dict(tiny_esm(layers=3, seed=9).esm.state_dict())
    assert not same_model(before, model_fingerprint(model))


def test_other_shapes_are_another_model(model):
    fingerprint = model_fingerprint(model)
    assert not same_model(fingerprint, fingerprint[:2])
    assert not same_model(fingerprint, fingerprint[..., :-1])


def test_nan_equals_nothing(model):
    fingerprint = model_fingerprint(model).copy()
    fingerprint[1, 2, 3] = np.nan
    assert not same_model(fingerprint, model_fingerprint(model))
    assert not same_model(model_fingerprint(model), fingerprint)
    assert not same_model(fingerprint, fingerprint)


def test_zero_weights_have_a_fingerprint(model):
    with torch.no_grad():
        weight(model, 0, "key").zero_()
    fingerprint = model_fingerprint(model)
    assert np.isfinite(fingerprint).all()
    assert not fingerprint[0, 1].any()
    assert same_model(fingerprint, fingerprint)


def test_biases_and_other_weights_do_not_matter(model):
    before = model_fingerprint(model)
    with torch.no_grad():
        model.encoder.layer[0].intermediate.dense.weight.mul_(2)
    np.testing.assert_array_equal(model_fingerprint(model), before)


def test_models_made_under_inference_mode(tiny_esm):
    with torch.inference_mode():
        inferred = tiny_esm(head_dim=16, heads=4, layers=3).esm
        fingerprint = model_fingerprint(inferred)
    assert same_model(fingerprint, model_fingerprint(tiny_esm(head_dim=16, heads=4, layers=3).esm))
