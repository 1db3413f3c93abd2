"""Queries, keys and values of an extension by one multiplication."""

import pytest
import torch
from torch import nn

from esm_turbo import TurboEsmForMaskedLM
from esm_turbo.model.projections import fused_projections
from esm_turbo.modeling_esm_turbo import TurboEsmSelfAttention
from tests.helpers.models import random_ids


def attentions(model):
    return [module for module in model.modules() if isinstance(module, TurboEsmSelfAttention)]


def values_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def extension(model):
    ids, mask = random_ids([21, 9, 13])
    new_ids, new_mask = random_ids([4, 2, 3], seed=1, cls=False)
    cache = model(ids, mask, use_cache=True).past_key_values
    return model(new_ids, new_mask, past_key_values=cache).logits


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
def test_fused_projections_change_neither_outputs_nor_parameters(tiny_model, preset):
    model = tiny_model(preset=preset)
    before, expected = values_of(model), extension(model)
    with fused_projections(model) as fused:
        assert len(fused) == len(attentions(model)) > 1
        for (weight, bias), attention in zip(fused, attentions(model), strict=True):
            assert weight.shape == (3 * attention.all_head_size, model.config.hidden_size)
            assert bias.shape == weight.shape[:1]
        assert (extension(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(attention.fused is None for attention in attentions(model))


@torch.no_grad()
def test_writes_into_a_parameter_are_seen(tiny_model):
    model = tiny_model()
    with fused_projections(model) as fused:
        attention = attentions(model)[0]
        size = attention.all_head_size
        attention.key.weight.fill_(0.5)
        attention.value.bias.fill_(0.25)
        weight, bias = fused[0]
        assert (weight[size : 2 * size] == 0.5).all() and (bias[2 * size :] == 0.25).all()
        assert torch.equal(weight[:size], attention.query.weight)
        expected = extension(model)
    assert (extension(model) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_parameters_move_once(tiny_model):
    model = tiny_model()
    before = values_of(model)
    with fused_projections(model) as first:
        pass
    with fused_projections(model) as second:
        pass
    assert [(w.data_ptr(), b.data_ptr()) for w, b in first] == [(w.data_ptr(), b.data_ptr()) for w, b in second]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    model.double()
    with fused_projections(model) as third:
        assert {weight.dtype for weight, _ in third} == {torch.float64}


def test_a_model_is_saved_as_before(tiny_model, tmp_path):
    model = tiny_model()
    before, expected = values_of(model), extension(model)
    with fused_projections(model):
        pass
    model.save_pretrained(tmp_path)
    loaded = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")
    assert all(torch.equal(value, before[name]) for name, value in loaded.named_parameters())
    assert torch.equal(extension(loaded), expected)


class Adapter(nn.Linear):
    """More than a linear layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_projections_that_are_more_than_linear_are_left_alone(tiny_model):
    model = tiny_model()
    first, *others = attentions(model)
    first.value.__class__ = Adapter
    handle = others[0].query.register_forward_hook(lambda module, args, output: output + 1)
    expected = extension(model)
    with fused_projections(model) as fused:
        assert len(fused) == len(others) - 1
        assert first.fused is None and others[0].fused is None
        assert (extension(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    handle.remove()


@pytest.mark.parametrize("how", ["forward", "hook before"])
def test_adapters_on_plain_linear_layers_are_left_alone(tiny_model, how):
    model = tiny_model()
    first, *others = attentions(model)
    plain = extension(model)
    if how == "forward":
        inner = first.value.forward
        first.value.forward = lambda x: 2 * inner(x)
    else:
        first.value.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    expected = extension(model)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max()
    with fused_projections(model) as fused:
        assert len(fused) == len(others)
        assert (extension(model) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_projections_are_separate_again_after_an_error(tiny_model):
    model = tiny_model()
    with pytest.raises(KeyError), fused_projections(model):
        raise KeyError
    assert all(attention.fused is None for attention in attentions(model))
