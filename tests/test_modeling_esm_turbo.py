"""The models: exact beside Hugging Face's, converted from them, and with a cache."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import EsmForMaskedLM, EsmModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm import modeling_esm
from transformers.models.esm.modeling_esm import EsmLayer

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboEsmModel, TurboEsmSelfAttention, TurboKVCache
from esm_turbo.calibration import OtherWeightsWarning
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.kv.append import Append
from tests.helpers.models import MASK, assert_same_output, cast, make_config, make_esm, random_ids, relative_error

MakeModel = Callable[..., TurboEsmForMaskedLM]
# Heads and head size of the six published models.
GEOMETRIES = {"8M": (20, 16), "35M": (20, 24), "150M": (20, 32), "650M": (20, 64), "3B": (40, 64), "15B": (40, 128)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEW = torch.tensor([[5, 6, 7], [8, 9, 10]])


@torch.no_grad()
@pytest.mark.parametrize("size", GEOMETRIES)
def test_prefill_is_exact_in_every_published_geometry(size: str) -> None:
    """Hidden states, logits, attentions and contacts, with and without a cache; padding and masks in the batch."""
    heads, head_dim = GEOMETRIES[size]
    hf = make_esm(heads=heads, head_dim=head_dim, layers=2 if heads * head_dim <= 640 else 1)
    ids, mask = random_ids([14, 9, 4], masks=2, eos=True)
    # A CPU needs a minute for the largest models in the other dtypes.
    for dtype in DTYPES if heads == 20 else DTYPES[:1]:
        hf = cast(hf, dtype)
        for attention in ("eager", "sdpa"):
            hf.set_attn_implementation(attention)
            ours = TurboEsmForMaskedLM.from_esm(hf, preset="exact")
            options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
            expected = hf(ids, mask, **options)
            assert expected.logits.dtype == dtype
            cached = ours(ids, mask, use_cache=True, **options)
            assert_same_output(ours(ids, mask, **options), expected)
            assert_same_output(cached, expected)
            assert cached.past_key_values.lengths.tolist() == [14, 9, 4]
            if attention == "eager":
                contacts = hf.predict_contacts(ids, mask)
                assert torch.equal(ours.predict_contacts(ids, mask), contacts)
            else:
                error = (ours.predict_contacts(ids, mask) - contacts).abs().max()
                assert error <= 20 * torch.finfo(dtype).eps


@torch.no_grad()
@pytest.mark.parametrize("head_dim", sorted({head_dim for _, head_dim in GEOMETRIES.values()}))
def test_compressed_caches_in_every_head_size(tiny_model: MakeModel, head_dim: int) -> None:
    """An extension by a token in its own place comes near the full run, whatever the head size."""
    model = tiny_model(preset=DEFAULT_PRESET, head_dim=head_dim, heads=3)
    ids, mask = random_ids([20, 20])
    full = model(ids, mask, use_cache=True)
    seen = torch.ones(2, 21, dtype=torch.int64)
    seen[:, 10] = 0
    one = model(ids[:, 10:11], seen, torch.tensor([[10]]), past_key_values=full.past_key_values)
    assert 1e-4 < relative_error(one.logits, full.logits[:, 10:11]) < 0.5


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_base_model_is_exact(attention: str) -> None:
    """`EsmModel` with and without its pooler."""
    ids, mask = random_ids([14, 9], masks=1, eos=True)
    for pooler in (True, False):
        hf = EsmModel._from_config(make_config(), attn_implementation=attention, add_pooling_layer=pooler).eval()
        ours = TurboEsmModel.from_esm(hf, preset="exact")
        expected = hf(ids, mask, output_hidden_states=True)
        assert_same_output(ours(ids, mask, output_hidden_states=True), expected)
        cached = ours(ids, mask, output_hidden_states=True, use_cache=True)
        assert_same_output(cached, expected)
        assert isinstance(cached.past_key_values, TurboKVCache)
        assert (ours(ids, mask).pooler_output is not None) == pooler
        contacts = ours.predict_contacts(ids, mask)
        hf.set_attn_implementation("eager")
        assert (contacts - hf.predict_contacts(ids, mask)).abs().max() <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"emb_layer_norm_before": True},
        {"token_dropout": False},
        {"tie_word_embeddings": False},
        {"hidden_size": 96, "heads": 6},
        {"eos_token_id": None},
    ],
    ids=str,
)
def test_other_configurations_are_exact(options: dict[str, object]) -> None:
    hf = make_esm(**options)
    ours = TurboEsmForMaskedLM.from_esm(hf, preset="exact")
    ids, mask = random_ids([14, 9], masks=2, eos=True)
    expected = hf(ids, mask, output_hidden_states=True)
    assert_same_output(ours(ids, mask, output_hidden_states=True, use_cache=True), expected)
    seen = torch.ones(14, 15, dtype=torch.int64)
    seen[torch.arange(14), torch.arange(14)] = 0
    cache = ours(ids[:1], use_cache=True).past_key_values
    one = ours(ids[0][:, None], seen, torch.arange(14)[:, None], past_key_values=cache)
    assert (one.logits[:, 0] - hf(ids[:1]).logits[0]).abs().max() <= 2e-5


@torch.no_grad()
def test_inputs_in_every_form(tiny_model: MakeModel) -> None:
    """No mask, a mask of ones, booleans, other positions, embeddings."""
    hf, ours = make_esm(), tiny_model()
    ids, mask = random_ids([14, 14], masks=2, eos=True)
    positions = torch.arange(14)[None] + torch.tensor([[3], [500]])
    for args in ((ids,), (ids, mask), (ids, mask.bool()), (ids, mask, positions), (ids, None, positions[:1])):
        expected = hf(*args)
        assert_same_output(ours(*args), expected)
        assert_same_output(ours(*args, use_cache=True), expected)
    embeddings = hf.esm.embeddings.word_embeddings(ids)
    assert_same_output(ours(inputs_embeds=embeddings), hf(inputs_embeds=embeddings))
    labels = torch.where(ids == MASK, 7, -100)
    assert_same_output(ours(ids, mask, labels=labels), hf(ids, mask, labels=labels))
    assert_same_output(ours(ids, mask, labels=labels, use_cache=True), hf(ids, mask, labels=labels))


def test_gradients_equal_hugging_faces(tiny_model: MakeModel) -> None:
    hf, ours = make_esm().train(), tiny_model().train()
    ids, mask = random_ids([14, 9], masks=2)
    labels = torch.where(ids == MASK, 7, -100)
    hf(ids, mask, labels=labels).loss.backward()
    ours(ids, mask, labels=labels).loss.backward()
    mine = dict(ours.named_parameters())
    for name, parameter in hf.named_parameters():
        assert (parameter.grad is None) == (mine[name].grad is None)
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, mine[name].grad), name


@torch.no_grad()
def test_use_cache_is_false_unless_asked_for(tiny_model: MakeModel) -> None:
    """Published configurations say `use_cache: true`; that is for models with a cache of another kind."""
    model = tiny_model()
    assert model.config.use_cache is True
    ids, mask = random_ids([9, 5])
    assert model(ids, mask).past_key_values is None
    assert model.esm(ids, mask).past_key_values is None
    assert model(ids, mask, use_cache=False).past_key_values is None
    cache = model(ids, mask, use_cache=True).past_key_values
    assert model(ids, past_key_values=cache).past_key_values is None
    assert model.esm(ids, past_key_values=cache).past_key_values is None
    assert cache.lengths.tolist() == [9, 5]
    assert model.esm(ids, past_key_values=cache, use_cache=True).past_key_values is cache
    assert cache.lengths.tolist() == [18, 14]


@torch.no_grad()
def test_hidden_states_only_on_request(tiny_model: MakeModel) -> None:
    model = tiny_model(layers=3)
    ids, mask = random_ids([9, 5])
    output = model(ids, mask, use_cache=True)
    assert output.hidden_states is None
    assert output.attentions is None
    asked = model(ids, past_key_values=output.past_key_values, output_hidden_states=True)
    assert len(asked.hidden_states) == 4
    last = model.esm(ids, past_key_values=output.past_key_values).last_hidden_state
    assert torch.equal(asked.hidden_states[-1], last)


@torch.no_grad()
def test_tuples(tiny_model: MakeModel) -> None:
    """`return_dict=False`: the same tuples, then the cache."""
    hf, ours = make_esm(), tiny_model()
    ids, mask = random_ids([9, 5])
    expected = hf(ids, mask, output_hidden_states=True, return_dict=False)
    plain = ours(ids, mask, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple)
    assert len(plain) == len(expected) == 2
    assert torch.equal(plain[0], expected[0])
    logits, cache = ours(ids, mask, use_cache=True, return_dict=False)
    assert torch.equal(logits, expected[0])
    assert isinstance(cache, TurboKVCache)
    extended = ours(ids, past_key_values=cache, return_dict=False)
    assert len(extended) == 1
    assert torch.equal(extended[0], ours(ids, past_key_values=cache).logits)
    base = ours.esm(ids, mask, use_cache=True, return_dict=False)
    assert torch.equal(base[0], expected[1][-1])
    assert isinstance(base[1], TurboKVCache)
    assert isinstance(ours(ids, mask, use_cache=True, return_dict=True).past_key_values, TurboKVCache)


def test_from_esm_shares_the_weights(tiny_model: MakeModel) -> None:
    hf = make_esm()
    ours = TurboEsmForMaskedLM.from_esm(hf, preset="exact")
    theirs = dict(hf.named_parameters(remove_duplicate=False)) | dict(hf.named_buffers())
    mine = dict(ours.named_parameters(remove_duplicate=False)) | dict(ours.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in theirs)
    assert ours.training == hf.training
    assert {type(layer.attention.self) for layer in ours.esm.encoder.layer} == {TurboEsmSelfAttention}


@torch.no_grad()
def test_from_esm_does_not_change_the_original() -> None:
    hf = make_esm(attn_implementation="eager").train()
    ids, mask = random_ids([9, 5], masks=1)
    types = {name: type(module) for name, module in hf.named_modules()}
    before, config = hf(ids, mask).logits, hf.config.to_dict()
    ours = TurboEsmForMaskedLM.from_esm(hf, preset="exact")
    ours.set_attn_implementation("sdpa")
    ours.eval()
    ours.config.use_cache = False
    ours(ids, mask, use_cache=True)
    ours.predict_contacts(ids, mask)
    assert {name: type(module) for name, module in hf.named_modules()} == types
    assert hf.config._attn_implementation == "eager"
    assert hf.config.to_dict() == config
    assert hf.training
    assert torch.equal(hf(ids, mask).logits, before)


def test_transformers_is_not_patched(tiny_model: MakeModel) -> None:
    """Nothing of `transformers` is replaced: neither names, nor methods, nor registered attention functions."""
    functions = set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    tiny_model(preset=DEFAULT_PRESET)
    assert set(ALL_ATTENTION_FUNCTIONS.valid_keys()) == functions
    assert not [name for name in functions if "turbo" in name]
    assert modeling_esm.EsmSelfAttention.forward.__qualname__ == "EsmSelfAttention.forward"
    for name, value in vars(modeling_esm).items():
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            assert not str(getattr(member, "__module__", "")).startswith("esm_turbo"), name
    hf = make_esm()
    assert {type(layer.attention.self) for layer in hf.esm.encoder.layer} == {modeling_esm.EsmSelfAttention}


def test_from_esm_refuses_other_architectures() -> None:
    with torch.device("meta"):
        learned = EsmForMaskedLM._from_config(make_config(position_embedding_type="absolute"))
    with pytest.raises(ValueError, match="ESM-2"):
        TurboEsmForMaskedLM.from_esm(learned)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_from_esm_keeps_rounded_frequencies(dtype: torch.dtype) -> None:
    """A model whose frequencies were rounded is converted as it is, and stays exact beside the original."""
    hf = make_esm().to(dtype)
    assert hf.esm.rotary_embeddings.inv_freq.dtype == dtype
    ids, mask = random_ids([14, 9], masks=1)
    ours = TurboEsmForMaskedLM.from_esm(hf, preset="exact")
    assert_same_output(ours(ids, mask, use_cache=True), hf(ids, mask))


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(),
                                    lambda m: m.to("cpu", torch.float16), lambda m: m.double()])  # fmt: skip
def test_frequencies_stay_in_float32(tiny_model: MakeModel, change: Callable[[TurboEsmForMaskedLM], object]) -> None:
    model = tiny_model()
    before = model.esm.rotary_embeddings.inv_freq.clone()
    change(model)
    assert model.dtype != torch.float32
    assert torch.equal(model.esm.rotary_embeddings.inv_freq, before)


def test_state_dict(tiny_model: MakeModel, tmp_path: Path) -> None:
    """`torch.save` of the state, read back into a model of other weights, and Hugging Face's state into ours."""
    source, target = tiny_model(), tiny_model(seed=1)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    assert target.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)).missing_keys == []
    ids, mask = random_ids([9, 5])
    with torch.no_grad():
        assert torch.equal(target(ids, mask).logits, source(ids, mask).logits)
        other = tiny_model(seed=1)
        other.load_state_dict(make_esm().state_dict())
        assert torch.equal(other(ids, mask).logits, source(ids, mask).logits)
    assert make_esm(seed=1).load_state_dict(source.state_dict()).unexpected_keys == []


@pytest.fixture(scope="module")
def plain(tiny_model: MakeModel) -> TurboEsmForMaskedLM:
    return tiny_model()


@pytest.fixture
def cache(plain: TurboEsmForMaskedLM) -> TurboKVCache:
    with torch.no_grad():
        return plain(*random_ids([9, 5]), use_cache=True).past_key_values


def test_an_error_during_an_append_leaves_the_cache_unchanged(
    plain: TurboEsmForMaskedLM, cache: TurboKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is appended comes in at the end, for all layers at once."""
    stage = TurboKVCache.stage

    def staged(self: TurboKVCache, append: Append, layer: int, *arguments: object) -> object:
        return stage(self, append, layer, *arguments) if layer == 0 else 1 / 0

    monkeypatch.setattr(TurboKVCache, "stage", staged)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        plain(NEW, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [9, 5]
    assert {layer.columns for layer in cache.layers} == {9}


def test_an_empty_cache_of_another_model(plain: TurboEsmForMaskedLM, tiny_model: MakeModel) -> None:
    for other in (tiny_model(seed=1), tiny_model(layers=3)):
        with torch.no_grad(), pytest.raises(ValueError, match=r"another model|3 layers"):
            plain(NEW, past_key_values=other.new_cache(), use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_can_be_pickled_after_a_forward(attention: str) -> None:
    """transformers' recorders of hidden states and attentions cannot; the copy installs its own."""
    model = TurboEsmForMaskedLM.from_esm(make_esm(layers=2, attn_implementation=attention), preset="exact")
    ids, mask = random_ids([9, 5])
    wanted = {"output_hidden_states": True, "output_attentions": attention == "eager", "use_cache": True}
    model.esm.model_id = "with a hook"
    expected = model(ids, mask, **wanted)
    seen = []
    model.esm.encoder.layer[0].register_forward_hook(_note)
    other = pickle.loads(pickle.dumps(model))
    for one in (model, other, copy.deepcopy(model)):
        output = one(ids, mask, **wanted)
        assert_same_output(output, {name: x for name, x in expected.items() if name != "past_key_values"})
        with pytest.raises(ValueError, match="another model"):
            TurboEsmForMaskedLM.from_esm(make_esm(layers=2, seed=1), preset="exact")(
                NEW, past_key_values=output.past_key_values
            )
        seen += one.esm.encoder.layer[0]._forward_hooks.values()
    # One's own hooks are kept.
    assert seen.count(_note) == 3


def _note(*_: object) -> None:
    """A hook."""


def _key_through_data(model: TurboEsmForMaskedLM) -> None:
    model.esm.encoder.layer[1].attention.self.key.weight.data.mul_(1.5)


def _feed_forward(model: TurboEsmForMaskedLM) -> None:
    model.esm.encoder.layer[0].intermediate.dense.weight.data[:8].mul_(3)


@torch.no_grad()
@pytest.mark.parametrize("take", [copy.copy, lambda model: model._replicate_for_data_parallel()])
def test_shallow_copies_compute_with_their_own_modules(take: Callable[[TurboEsmModel], TurboEsmModel]) -> None:
    encoder = TurboEsmForMaskedLM.from_esm(make_esm(), preset="exact").esm
    ids, mask = random_ids([12], masks=0)
    before = encoder(ids, mask).last_hidden_state
    cache = encoder(ids, mask, use_cache=True).past_key_values
    copied = take(encoder)
    assert torch.equal(copied(ids, mask).last_hidden_state, before)
    copied._modules = {**copied._modules, "encoder": copy.deepcopy(encoder.encoder)}
    copied.encoder.layer[0].intermediate.dense.weight.mul_(3)
    changed = copied(ids, mask).last_hidden_state
    assert (changed - before).abs().max() > 1e-2
    assert torch.equal(copied(ids, mask, use_cache=True).last_hidden_state, changed)
    assert torch.equal(copy.deepcopy(copied)(ids, mask).last_hidden_state, changed)
    with pytest.raises(ValueError, match="another model: the weights differ"):
        copied(ids, past_key_values=cache)
    assert torch.equal(encoder(ids, mask).last_hidden_state, before)


def _put_back(encoder: TurboEsmModel, copied: Callable[[EsmLayer], EsmLayer], layers: int = 1) -> TurboEsmModel:
    for index in range(layers):
        encoder.encoder.layer[index] = copied(encoder.encoder.layer[index])
    return encoder


def _of_the_library(layer: EsmLayer) -> EsmLayer:
    made = EsmLayer(layer.attention.self.config)
    made.load_state_dict(layer.state_dict())
    return made.eval()


@pytest.mark.parametrize(
    "change",
    [
        copy.copy,
        lambda encoder: _put_back(encoder, copy.deepcopy),
        lambda encoder: _put_back(encoder, lambda layer: pickle.loads(pickle.dumps(layer))),
        lambda encoder: _put_back(copy.copy(encoder), copy.deepcopy),
        lambda encoder: _put_back(encoder, _of_the_library),
        lambda encoder: _put_back(encoder, _of_the_library, layers=3),
        lambda encoder: _put_back(torch.compile(encoder, backend="eager"), copy.deepcopy),
    ],
    ids=[
        "shallow copy",
        "copied layer",
        "pickled layer",
        "copied layer of a shallow copy",
        "one of the library's",
        "all of the library's",
        "copied layer of a compiled model",
    ],
)
@torch.no_grad()
def test_each_layer_of_a_copied_model_is_recorded_once(change: Callable[[TurboEsmModel], TurboEsmModel]) -> None:
    encoder = TurboEsmForMaskedLM.from_esm(make_esm(layers=3, attn_implementation="eager"), preset="exact").esm
    ids, mask = random_ids([12], masks=0)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    expected = encoder(ids, mask, **wanted)
    for one in (change(encoder), encoder):
        found = one(ids, mask, **wanted)
        for name in ("hidden_states", "attentions"):
            assert len(found[name]) == len(expected[name]) and all(map(torch.equal, found[name], expected[name]))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::esm_turbo.calibration.OtherWeightsWarning")
@pytest.mark.parametrize("change", [_key_through_data, _feed_forward])
def test_a_changed_model_never_reads_its_old_cache(
    tiny_model: MakeModel, tmp_path: Path, change: Callable[[TurboEsmForMaskedLM], None]
) -> None:
    """Neither the one in memory, whose codec is the model's own, nor a copy, nor one on disk."""
    model = copy.deepcopy(tiny_model(preset=DEFAULT_PRESET))
    ids, _ = random_ids([12])
    cache = model(ids, use_cache=True).past_key_values
    other = cache.select(0)
    cache.save(tmp_path / "cache.safetensors")
    model(NEW[:1], past_key_values=cache)
    change(model)
    for old in (cache, other, TurboKVCache.load(tmp_path / "cache.safetensors")):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"weights differ|weights are not this model's"):
                model(NEW[:1], past_key_values=old)


@torch.no_grad()
def test_a_calibration_from_before_a_change_warns_once(tiny_model: MakeModel) -> None:
    model = copy.deepcopy(tiny_model(preset=DEFAULT_PRESET))
    ids, _ = random_ids([12])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, use_cache=True)
    _feed_forward(model)
    with pytest.warns(OtherWeightsWarning, match="before the model was fine-tuned or adapted"):
        cache = model(ids, use_cache=True).past_key_values
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(NEW[:1], past_key_values=cache)
        model(ids, use_cache=True)


@torch.no_grad()
def test_a_calibration_is_refused_after_the_attention_weights_change(tiny_model: MakeModel) -> None:
    model = copy.deepcopy(tiny_model(preset=DEFAULT_PRESET))
    _key_through_data(model)
    with pytest.raises(ValueError, match="the weights are not this model's"):
        model(random_ids([12])[0], use_cache=True)


@pytest.mark.parametrize("preset", ["exact", DEFAULT_PRESET])
def test_tasks_refuse_contexts_of_a_changed_model(turbo: TurboEsm, preset: str) -> None:
    """Before they compute anything, whatever the arm."""
    other = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    other.model.set_turbo(calibration=turbo.calibration, preset=preset)
    cache = other.prefill("MKTAYIAKQR")
    other.model.esm.encoder.layer[2].intermediate.dense.weight.data[:64] = 0
    for task in (
        lambda: other.extend(cache, "GSGS"),
        lambda: other.score(cache, ["GSGS"]),
        lambda: other.score_variants(cache, ["K2A"]),
        lambda: other.generate(cache, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match="the weights differ"):
            task()


@torch.no_grad()
def test_masks_of_padding_are_not_counted_in_a_context(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    """The library counts them for token dropout, so that a context would not be that of its tokens."""
    model, ids = tiny_model(preset="exact"), random_ids([6])[0]
    padded, mask = torch.cat([ids, torch.full((1, 3), MASK)], 1), torch.tensor([[1] * 6 + [0] * 3])
    alone, found = model(ids, use_cache=True), model(padded, mask, use_cache=True)
    assert (found.logits[:, :6] - alone.logits).abs().max() <= 2e-5
    new = random_ids([3], seed=1)[0]
    extended = [model(new, past_key_values=one.past_key_values).logits for one in (alone, found)]
    assert (extended[0] - extended[1]).abs().max() <= 2e-5
