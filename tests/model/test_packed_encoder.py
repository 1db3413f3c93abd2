"""The packed encoder against Hugging Face's own, and which encoders it may stand in for."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EsmForMaskedLM, EsmModel
from transformers.modeling_outputs import MaskedLMOutput

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.model import executor
from esm_turbo.model.packed_encoder import packed_encoder
from esm_turbo.model.packing import Packing, attention_to_cache
from esm_turbo.model.plain import plain_addresses
from esm_turbo.model.plan import PackedTokens
from esm_turbo.model.sessions import Extension
from tests.helpers import torch_encoder
from tests.helpers.models import random_ids
from tests.helpers.packed import Recorder, packed_tokens, plan_with, run_packed

LENGTHS = [17, 5, 30, 1]
# Both sum in float32, in other orders.
TOLERANCE = 2e-5


@pytest.mark.parametrize("lengths", [LENGTHS, [12, 12], [40]], ids=["ragged", "full", "single"])
def test_packing_round_trip(lengths: list[int]) -> None:
    width = max(lengths)
    packing = Packing.of(lengths, width, torch.device("cpu"))
    batch = torch.arange(len(lengths) * width * 2).view(len(lengths), width, 2)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    packed = packing.pack(batch)
    assert torch.equal(packed, batch[mask])
    assert torch.equal(packing.unpack(packed)[mask], batch[mask])
    assert torch.equal(packing.positions, mask.nonzero()[:, 1].to(torch.int32))
    assert packing.offsets.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert packing.longest == width


@pytest.mark.parametrize("lengths", [LENGTHS, [12, 12], [40]], ids=["ragged", "full", "single"])
@torch.no_grad()
def test_hidden_states_are_those_of_hugging_face(
    tiny_model: Callable[..., TurboEsmForMaskedLM], lengths: list[int]
) -> None:
    model = tiny_model(layers=3)
    ids, mask = random_ids(lengths, masks=0)
    packing, last, states = run_packed(model.esm, ids, mask, layers=(0, 1, 2))
    expected = model.esm(ids, mask, output_hidden_states=True).hidden_states
    for layer, found in {**states, 3: last}.items():
        assert (packing.unpack(found) - expected[layer])[mask.bool()].abs().max() <= TOLERANCE


@torch.no_grad()
def test_the_session_sees_keys_and_values(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    model = tiny_model()
    ids, mask = random_ids(LENGTHS)
    recorder = Recorder()
    run_packed(model.esm, ids, mask, session=recorder)
    cache = model(ids, mask, use_cache=True).past_key_values
    assert len(recorder.seen) == len(cache.layers)
    for (keys, values), layer in zip(recorder.seen, cache.layers, strict=True):
        for row, length in enumerate(LENGTHS):
            for found, stored in ((keys, layer.packed["keys"]), (values, layer.packed["values"])):
                assert (found[row, :, :length] - stored[row, :, :length]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@torch.no_grad()
def test_extensions_are_those_of_hugging_face_s_modules(
    tiny_model: Callable[..., TurboEsmForMaskedLM], preset: str
) -> None:
    model = tiny_model(preset=preset)
    cache = model(*random_ids(LENGTHS), use_cache=True).past_key_values
    ids, mask = random_ids([4, 7, 1, 5], cls=False, seed=1)
    positions = cache.lengths[:, None] + torch.arange(7)
    sessions = [Extension(cache, model.kv_backend, cache.valid(), mask.bool()) for _ in range(2)]
    embeddings = model.esm.embeddings(inputs_embeds=model.esm.embeddings.word_embeddings(ids))
    expected = EsmModel.forward(
        model.esm, position_ids=positions, inputs_embeds=embeddings, kv_session=sessions[0]
    ).last_hidden_state
    tokens = packed_tokens(
        embeddings.flatten(0, 1),
        positions.flatten(),
        model.esm.rotary_embeddings.inv_freq,
        attention_to_cache(plan_with(sessions[1]), len(ids)),
    )
    found, _ = packed_encoder(model.esm.encoder, tokens, torch_encoder)
    assert (found.view_as(expected) - expected)[mask.bool()].abs().max() <= TOLERANCE


@torch.no_grad()
def test_weights_changed_in_place_or_replaced_are_seen(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    model = tiny_model()
    ids, mask = random_ids(LENGTHS)
    _, before, _ = run_packed(model.esm, ids, mask)
    attention = model.esm.encoder.layer[0].attention.self
    for change in (
        lambda: attention.key.weight.mul_(1.5),
        lambda: attention.key.weight.data.mul_(1.5),
        lambda: setattr(attention, "query", nn.Linear(64, 64)),
        lambda: setattr(attention.value, "weight", nn.Parameter(torch.randn(64, 64))),
    ):
        change()
        packing, after, _ = run_packed(model.esm, ids, mask)
        assert (after - before).abs().max() > 100 * TOLERANCE
        expected = model.esm(ids, mask).last_hidden_state
        assert (packing.unpack(after) - expected)[mask.bool()].abs().max() <= TOLERANCE
        before = after


def test_weights_that_are_fused_in_inference_mode_can_still_be_trained(tiny_esm: Callable[..., EsmForMaskedLM]) -> None:
    model = TurboEsmForMaskedLM.from_esm(tiny_esm())
    ids, mask = random_ids(LENGTHS)
    with torch.inference_mode():
        run_packed(model.esm, ids, mask)
    weight = model.esm.encoder.layer[0].attention.self.query.weight
    assert not weight.is_inference()
    model(ids, mask).logits.sum().backward()
    assert weight.grad is not None


def test_which_encoders_are_plain(tiny_esm: Callable[..., EsmForMaskedLM]) -> None:
    model = tiny_esm()
    encoder = model.esm.encoder
    allowed = {type(module) for module in encoder.modules()}
    assert plain_addresses(encoder, allowed) is not None
    dense = encoder.layer[1].output.dense
    for register in (
        dense.register_forward_hook,
        encoder.layer[0].register_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert plain_addresses(encoder, allowed) is None
        handle.remove()
        assert plain_addresses(encoder, allowed) is not None
    # The library leaves its own hooks behind once hidden states were asked for.
    model.esm(random_ids([5])[0], output_hidden_states=True)
    assert any(layer._forward_hooks for layer in encoder.layer)
    assert plain_addresses(encoder, allowed) is not None
    dense.forward = dense.forward
    assert plain_addresses(encoder, allowed) is None
    del dense.forward
    dense._forward_hooks = OrderedDict()
    assert plain_addresses(encoder, allowed) is not None
    dense.register_forward_hook(lambda *_: None)
    assert plain_addresses(encoder, allowed) is None
    dense._forward_hooks = OrderedDict()
    before = plain_addresses(encoder, allowed)
    dense._parameters = {name: nn.Parameter(x.detach().clone()) for name, x in dense._parameters.items()}
    assert plain_addresses(encoder, allowed) != before
    value = encoder.layer[1].attention.self.value.weight
    before, value.data = plain_addresses(encoder, allowed), value.data.T
    assert before is not None and plain_addresses(encoder, allowed) is None
    value.data = value.data.T
    assert plain_addresses(encoder, allowed) == before
    encoder.layer[1].output.dense = nn.Sequential(dense)
    assert plain_addresses(encoder, allowed) is None


def test_copies_are_looked_at_anew(tiny_esm: Callable[..., EsmForMaskedLM]) -> None:
    encoder = tiny_esm().esm.encoder
    allowed = {type(module) for module in encoder.modules()}
    addresses = plain_addresses(encoder, allowed)
    for made in (copy.copy(encoder), copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        plain_addresses(made, allowed)
        made.forward = made.forward
        assert plain_addresses(made, allowed) is None
    assert plain_addresses(encoder, allowed) == addresses


def test_modules_that_refer_to_themselves_are_freed(tiny_esm: Callable[..., EsmForMaskedLM]) -> None:
    encoder = tiny_esm().esm.encoder
    allowed = {type(module) for module in encoder.modules()}
    encoder.forward = partial(type(encoder).forward, encoder)
    assert plain_addresses(encoder, allowed) is None
    kept = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert kept() is None


@pytest.fixture
def on_cuda(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> Callable[..., TurboEsmForMaskedLM]:
    """Makes a small model on a CUDA device, bfloat16 unless told otherwise."""

    def make(dtype: torch.dtype = torch.bfloat16, **options: object) -> TurboEsmForMaskedLM:
        return tiny_model(layers=4, head_dim=32, **options).to("cuda", dtype)

    return make


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every packed forward."""
    calls: list[int] = []

    # Of the executor rather than of the model's own module: there it would be unknown code, which nothing replaces.
    def spy(embeddings: Tensor, *rest: Any) -> PackedTokens:
        calls.append(len(embeddings))
        return PackedTokens(embeddings, *rest)

    monkeypatch.setattr(executor, "PackedTokens", spy)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_cache", [False, True])
# The shorter ones have few enough tokens for the kernel of linear layers.
@pytest.mark.parametrize("lengths", [LENGTHS, [7, 9]])
@torch.no_grad()
def test_error_is_that_of_hugging_face_in_the_same_dtype(
    on_cuda: Callable[..., TurboEsmForMaskedLM],
    packed_calls: list[int],
    dtype: torch.dtype,
    use_cache: bool,
    lengths: list[int],
) -> None:
    model = on_cuda(dtype)
    ids, mask = (x.cuda() for x in random_ids(lengths, masks=1))
    reference = on_cuda(torch.float32)(ids, mask, output_hidden_states=True)
    plain = model(ids, mask, output_hidden_states=True)
    found = model(ids, mask, output_hidden_states=True, use_cache=use_cache, row_lengths=lengths)
    assert packed_calls == [sum(lengths)]

    def errors(output: MaskedLMOutput) -> Tensor:
        pairs = zip([*output.hidden_states, output.logits], [*reference.hidden_states, reference.logits], strict=True)
        return torch.stack([(a.float() - b)[mask.bool()].square().mean().sqrt() for a, b in pairs])

    # Few tokens make the ratio itself uncertain: all layers together.
    assert errors(found).square().sum().sqrt() <= 1.2 * errors(plain).square().sum().sqrt()
    if use_cache:
        cache, expected = found.past_key_values, reference_cache(model, ids, mask)
        assert torch.equal(cache.lengths, expected.lengths)
        for one, other in zip(cache.layers, expected.layers, strict=True):
            for name in ("keys", "values"):
                for row, length in enumerate(lengths):
                    a, b = (x.packed[name][row, :, :length].float() for x in (one, other))
                    assert (a - b).abs().max() <= 0.1 * b.abs().max()


@pytest.mark.gpu
@torch.no_grad()
def test_the_configuration_may_ask_for_hidden_states(
    on_cuda: Callable[..., TurboEsmForMaskedLM], packed_calls: list[int]
) -> None:
    model = on_cuda(torch.bfloat16)
    ids, mask = (x.cuda() for x in random_ids([7, 9]))
    expected = model(ids, mask, output_hidden_states=True, row_lengths=[7, 9]).hidden_states
    model.config.output_hidden_states = True
    found = model(ids, mask, row_lengths=[7, 9]).hidden_states
    assert packed_calls == [16, 16] and all(map(torch.equal, found, expected))
    assert model(ids, mask, output_hidden_states=False, row_lengths=[7, 9]).hidden_states is None


def reference_cache(model: TurboEsmForMaskedLM, ids: Tensor, mask: Tensor) -> TurboKVCache:
    cache: TurboKVCache = model(ids, mask, use_cache=True).past_key_values
    return cache


@pytest.mark.gpu
@torch.no_grad()
def test_float32_stays_hugging_face_s_own(on_cuda: Callable[..., TurboEsmForMaskedLM], packed_calls: list[int]) -> None:
    model = on_cuda(torch.float32)
    ids, mask = (x.cuda() for x in random_ids(LENGTHS))
    assert torch.equal(model(ids, mask).logits, model(ids, mask, row_lengths=LENGTHS).logits)
    assert packed_calls == []


@pytest.mark.gpu
@torch.no_grad()
def test_what_the_packed_encoder_cannot_do_runs_without_it(
    on_cuda: Callable[..., TurboEsmForMaskedLM], packed_calls: list[int]
) -> None:
    ids, mask = (x.cuda() for x in random_ids(LENGTHS))
    model = on_cuda()
    calls: list[int] = []
    handle = model.esm.encoder.layer[2].output.dense.register_forward_hook(lambda *_: calls.append(1))
    model(ids, mask, row_lengths=LENGTHS)
    assert calls == [1]
    handle.remove()
    with torch.autocast("cuda"):
        model(ids, mask, row_lengths=LENGTHS)
    model(ids, mask, torch.arange(ids.shape[1], device="cuda")[None], row_lengths=LENGTHS)
    with torch.enable_grad():
        model(ids, mask, row_lengths=LENGTHS)
    model.set_turbo(preset="exact", backend="torch")
    model(ids, mask, row_lengths=LENGTHS)
    assert packed_calls == []
    model.set_turbo(preset="exact")
    model(ids, mask, row_lengths=LENGTHS)
    assert packed_calls == [sum(LENGTHS)]


def test_padding_repeats_a_token_of_its_own_row() -> None:
    packing = Packing.of([2, 1, 3], 3, torch.device("cpu"))
    packed = torch.arange(6.0)[:, None]
    assert packing.unpack(packed)[..., 0].tolist() == [[0, 1, 0], [2, 2, 2], [3, 4, 5]]


@pytest.mark.parametrize("lengths", [[17, 5, 30], [17, 5, 30, 0], [17, 5, 31, 1]], ids=["rows", "empty", "long"])
@torch.no_grad()
def test_row_lengths_that_do_not_fit_are_refused(
    tiny_model: Callable[..., TurboEsmForMaskedLM], lengths: list[int]
) -> None:
    ids, mask = random_ids(LENGTHS)
    with pytest.raises(ValueError, match=r"`row_lengths` must be 4 numbers of 30 to 30"):
        tiny_model()(ids, row_lengths=lengths)
    with pytest.raises(ValueError, match=r"`row_lengths` must be 4 numbers of 30 to 30"):
        tiny_model()(ids, row_lengths=LENGTHS)
    with pytest.raises(ValueError, match=r"`row_lengths` are of rows that are padded on the right, without holes"):
        tiny_model()(ids, mask.flip(1), row_lengths=mask.sum(1).tolist())
    with pytest.raises(ValueError, match=r"`row_lengths` .* are not the sums of `attention_mask`"):
        tiny_model()(ids, mask, row_lengths=lengths)
