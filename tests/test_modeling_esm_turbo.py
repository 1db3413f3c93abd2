"""The models: exact beside Hugging Face's, converted, loaded and saved, and what they refuse."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, EsmConfig, EsmForMaskedLM, EsmForSequenceClassification, EsmModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm import modeling_esm

from esm_turbo import TurboConfig, TurboEsmForMaskedLM, TurboEsmModel, TurboEsmSelfAttention, TurboKVCache
from esm_turbo.config import DEFAULT_PRESET, PRESETS
from tests.helpers.models import CLS, EOS, MASK, make_config, make_esm, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]
PUBLISHED = Path(__file__).parent / "data" / "published_configs"
# Heads and head size of the six published models.
GEOMETRIES = {"8M": (20, 16), "35M": (20, 24), "150M": (20, 32), "650M": (20, 64), "3B": (40, 64), "15B": (40, 128)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INV_FREQ = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"


def cast(model: EsmForMaskedLM, dtype: torch.dtype) -> EsmForMaskedLM:
    """To a dtype, with rotary frequencies in float32 as a checkpoint's are."""
    frequencies = model.esm.rotary_embeddings.inv_freq
    model = model.to(dtype)
    model.esm.rotary_embeddings.inv_freq = frequencies.float()
    return model


def assert_same_output(ours: object, theirs: object) -> None:
    """Bit for bit, in all that Hugging Face's output holds."""
    for name in theirs:
        mine, other = getattr(ours, name), theirs[name]
        if isinstance(other, tuple):
            assert len(mine) == len(other)
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), name
        else:
            assert torch.equal(mine, other), name


@contextlib.contextmanager
def transformers_log() -> Iterator[list[str]]:
    """Collects warnings and errors of the logger `transformers`, which does not propagate."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Collect(logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# ---------------------------------------------------------------- prefill is exact


@torch.no_grad()
@pytest.mark.parametrize("size", GEOMETRIES)
def test_prefill_is_exact_in_every_published_geometry(size: str) -> None:
    """Hidden states, logits, attentions and contacts, with and without a cache; padding and masks in the batch."""
    heads, head_dim = GEOMETRIES[size]
    hf = make_esm(heads=heads, head_dim=head_dim, layers=2 if heads * head_dim <= 640 else 1)
    ids, mask = random_ids([14, 9, 4], masks=2, eos=True)
    for dtype in DTYPES:
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
    expected = full.logits[:, 10:11]
    error = (one.logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-4 < error < 0.5


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


def test_training_works_as_ever(tiny_model: MakeModel) -> None:
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
def test_hidden_states_only_where_asked_for(tiny_model: MakeModel) -> None:
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


@torch.no_grad()
def test_attentions_come_with_a_cache(tiny_model: MakeModel) -> None:
    """Under eager attention a prefill that writes a cache returns the weights as any forward does."""
    model = tiny_model(preset=DEFAULT_PRESET, attn_implementation="eager")
    ids, mask = random_ids([9, 5])
    attentions = model(ids, mask, use_cache=True, output_attentions=True).attentions
    assert [a.shape for a in attentions] == [(2, 4, 9, 9)] * 2
    assert ((attentions[1].sum(-1) - 1).abs() <= 1e-5).all()
    assert (attentions[1][1, :, :, 5:] == 0).all()


def test_inference_mode(tiny_model: MakeModel) -> None:
    """A cache written in inference mode is used outside of it, and the other way round."""
    model = tiny_model(preset=DEFAULT_PRESET)
    ids, mask = random_ids([9, 5])
    with torch.inference_mode():
        cache = model(ids, mask, use_cache=True).past_key_values
    with torch.no_grad():
        outside = model(ids, past_key_values=cache, use_cache=True).logits
        again = model(ids, mask, use_cache=True).past_key_values
    cache.crop(3)
    with torch.inference_mode():
        assert torch.equal(model(ids, past_key_values=again, use_cache=True).logits, outside)


# ---------------------------------------------------------------- conversion


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
def test_from_esm_leaves_the_original_as_it_is() -> None:
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


def test_the_library_is_left_as_it_is(tiny_model: MakeModel) -> None:
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


@torch.no_grad()
def test_another_model_of_the_process_is_unaffected() -> None:
    hf = EsmForSequenceClassification._from_config(make_config(num_labels=3)).eval()
    ids, mask = random_ids([9, 5])
    before = hf(ids, mask).logits
    ours = TurboEsmModel.from_esm(hf.esm, preset="exact")
    cache = ours(ids, mask, use_cache=True).past_key_values
    ours(ids, past_key_values=cache)
    assert torch.equal(hf(ids, mask).logits, before)


def test_from_esm_of_what_is_not_esm2() -> None:
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


@torch.no_grad()
def test_a_deep_copy(tiny_model: MakeModel) -> None:
    model = tiny_model(preset=DEFAULT_PRESET)
    ids, mask = random_ids([9, 5])
    other = copy.deepcopy(model)
    cache = model(ids, mask, use_cache=True).past_key_values
    assert torch.equal(other(ids, past_key_values=cache).logits, model(ids, past_key_values=cache).logits)


@torch.no_grad()
def test_changed_weights_do_not_pass_for_the_old_ones(tiny_model: MakeModel) -> None:
    model = tiny_model()
    ids, mask = random_ids([9, 5])
    cache = model(ids, mask, use_cache=True).past_key_values
    model.load_state_dict(tiny_model(seed=1).state_dict())
    with pytest.raises(ValueError, match="another model"):
        model(ids, past_key_values=cache)


# ---------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("dtype", DTYPES)
def test_save_pretrained_is_read_by_both(tiny_model: MakeModel, tmp_path: Path, dtype: torch.dtype) -> None:
    """Published keys, frequencies in float32, the same outputs from Hugging Face's class and from ours, no warning."""
    model = tiny_model(head_dim=24, layers=3)
    model.esm.rotary_embeddings.inv_freq.mul_(1.001)
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    frequencies = {name: tensor for name, tensor in saved.items() if "inv_freq" in name}
    assert sorted(frequencies) == [INV_FREQ.format(layer) for layer in range(3)]
    assert all(torch.equal(f, model.esm.rotary_embeddings.inv_freq) for f in frequencies.values())
    assert all(f.dtype == torch.float32 for f in frequencies.values())
    assert saved["esm.encoder.layer.0.attention.self.key.weight"].dtype == dtype
    assert not [name for name in saved if "*" in name]
    ids, mask = random_ids([14, 9], masks=1)
    with torch.no_grad():
        expected = model(ids, mask).logits
        for cls in (TurboEsmForMaskedLM, EsmForMaskedLM):
            with transformers_log() as log:
                loaded = cls.from_pretrained(tmp_path, dtype=dtype).eval()
            assert log == []
            if cls is EsmForMaskedLM:
                # Hugging Face's class may round them.
                loaded.esm.rotary_embeddings.inv_freq = loaded.esm.rotary_embeddings.inv_freq.float()
                if dtype != torch.float32:
                    continue
            assert torch.equal(loaded.esm.rotary_embeddings.inv_freq, model.esm.rotary_embeddings.inv_freq)
            assert torch.equal(loaded(ids, mask).logits, expected)


def test_save_pretrained_of_the_base_model(tmp_path: Path) -> None:
    model = TurboEsmModel.from_esm(EsmModel._from_config(make_config()).eval(), preset="exact")
    model.save_pretrained(tmp_path)
    assert INV_FREQ.format(1).removeprefix("esm.") in load_file(tmp_path / "model.safetensors")
    ids, mask = random_ids([14, 9])
    for cls in (TurboEsmModel, EsmModel):
        with transformers_log() as log:
            loaded = cls.from_pretrained(tmp_path).eval()
        assert log == []
        with torch.no_grad():
            assert torch.equal(loaded(ids, mask).last_hidden_state, model(ids, mask).last_hidden_state)


def test_the_base_model_of_a_masked_lm(tiny_model: MakeModel, tmp_path: Path) -> None:
    """`TurboEsmModel` reads a checkpoint with a language-model head, as `EsmModel` does."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = TurboEsmModel.from_pretrained(tmp_path, add_pooling_layer=False, preset="exact").eval()
    ids, mask = random_ids([14, 9])
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask).last_hidden_state, model.esm(ids, mask).last_hidden_state)
        assert torch.equal(loaded.predict_contacts(ids, mask), model.predict_contacts(ids, mask))
    assert torch.equal(loaded.rotary_embeddings.inv_freq, model.esm.rotary_embeddings.inv_freq)


def test_save_pretrained_in_shards(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(layers=3)
    model.save_pretrained(tmp_path, max_shard_size="100kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with transformers_log() as log:
        loaded = TurboEsmForMaskedLM.from_pretrained(tmp_path).eval()
    assert log == []
    ids, mask = random_ids([14, 9])
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask).logits, model(ids, mask).logits)


def published_checkpoint(name: str, folder: Path, *, binary: bool = False, tied_weight: bool = False) -> EsmForMaskedLM:
    """A folder as on the hub: configuration and tokenizer as published, random weights under the keys of then.

    Returns Hugging Face's model with these weights; its rotary frequencies are a little off the default, so that it
    shows whether the checkpoint's are used.
    """
    shutil.copytree(PUBLISHED / name, folder, dirs_exist_ok=True)
    config = EsmConfig.from_pretrained(folder)
    model = make_esm(
        heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        layers=config.num_hidden_layers,
        intermediate_size=config.intermediate_size,
    )
    model.esm.rotary_embeddings.inv_freq *= 1.001
    state = {}
    for key, tensor in model.state_dict().items():
        if key == "esm.rotary_embeddings.inv_freq":
            state |= {INV_FREQ.format(layer): tensor.clone() for layer in range(config.num_hidden_layers)}
        elif key != "lm_head.decoder.weight" or tied_weight:
            state[key] = tensor.clone()
    state["esm.embeddings.position_ids"] = torch.arange(1026)[None]
    state["esm.embeddings.position_embeddings.weight"] = torch.randn(1026, config.hidden_size)
    if binary:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("tied_weight", [False, True], ids=["", "with the tied weight"])
@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", sorted(path.name for path in PUBLISHED.iterdir()))
def test_published_checkpoints(tmp_path: Path, name: str, binary: bool, tied_weight: bool) -> None:
    """Keys of older versions neither warn nor cost anything: the contact head and the frequencies are the file's."""
    expected = published_checkpoint(name, tmp_path, binary=binary, tied_weight=tied_weight)
    with transformers_log() as log:
        model = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact").eval()
    assert log == []
    assert torch.equal(model.esm.rotary_embeddings.inv_freq, expected.esm.rotary_embeddings.inv_freq)
    assert torch.equal(model.esm.contact_head.regression.weight, expected.esm.contact_head.regression.weight)
    ids, mask = random_ids([12, 7], masks=1, eos=True)
    with torch.no_grad():
        assert torch.equal(model(ids, mask, use_cache=True).logits, expected(ids, mask).logits)
        expected.set_attn_implementation("eager")
        contacts = expected.predict_contacts(ids, mask)
        assert (model.predict_contacts(ids, mask) - contacts).abs().max() <= 1e-5
    assert model.dtype == torch.float32
    assert contacts.std() > 0.01


def test_layer_norms_of_older_checkpoints(tmp_path: Path) -> None:
    """`gamma` and `beta` are `weight` and `bias`."""
    name = "esm2_t6_8M_UR50D"
    expected = published_checkpoint(name, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in state.items()
    }
    assert renamed.keys() != state.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with transformers_log() as log:
        model = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact").eval()
    assert log == []
    ids, mask = random_ids([12, 7])
    with torch.no_grad():
        assert torch.equal(model(ids, mask).logits, expected(ids, mask).logits)


def test_a_weight_that_is_missing(tmp_path: Path) -> None:
    """One of the encoder is an error, one of a head is reported: the silence above is not deafness."""
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    weight = state.pop("esm.contact_head.regression.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with transformers_log() as log:
        TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")
    assert any("contact_head.regression.weight" in message for message in log)
    state["esm.contact_head.regression.weight"] = weight
    state.pop("esm.encoder.layer.3.output.dense.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of the encoder, such as .*3\.output\.dense\.weight"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")


def test_a_checkpoint_without_frequencies(tmp_path: Path) -> None:
    """They follow from the configuration, and some programs do not save them."""
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path)
    state = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if "inv_freq" not in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")
    expected = 10000 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.esm.rotary_embeddings.inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_what_hugging_face_saves_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its newer versions write the frequencies under a key of their own making."""
    hf = make_esm()
    hf.esm.rotary_embeddings.inv_freq *= 1.01
    hf = hf.to(dtype)
    hf.save_pretrained(tmp_path)
    with transformers_log() as log:
        model = TurboEsmForMaskedLM.from_pretrained(tmp_path, dtype=dtype, preset="exact").eval()
    assert log == []
    assert torch.equal(model.esm.rotary_embeddings.inv_freq, hf.esm.rotary_embeddings.inv_freq.float())
    ids, mask = random_ids([12, 7])
    with torch.no_grad():
        assert torch.equal(model(ids, mask).logits, hf(ids, mask).logits)


class _Bomb:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_code_is_refused(tmp_path: Path, legacy: bool) -> None:
    """It is not run, and the message says how to convert a checkpoint that is trusted."""
    folder, trap = tmp_path / "model", tmp_path / "trap"
    shutil.copytree(PUBLISHED / "esm2_t6_8M_UR50D", folder)
    torch.save({"x": _Bomb(trap)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safetensors"):
        TurboEsmForMaskedLM.from_pretrained(folder)
    assert not trap.exists()


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_truncated_checkpoint(tmp_path: Path, binary: bool, share: float) -> None:
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path, binary=binary)
    path = tmp_path / ("pytorch_model.bin" if binary else "model.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="damaged"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_the_configuration(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ValueError, match="do not fit"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(tiny_model: MakeModel, tmp_path: Path, value: float) -> None:
    model = tiny_model()
    model.esm.encoder.layer[1].output.dense.weight.data[3, 4] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.output\.dense\.weight holds NaN or infinity"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "esm", "position_embedding_type": "absolute"}, "absolute positions"),
        ({"model_type": "esm"}, "absolute positions"),
        (BertConfig(num_hidden_layers=1).to_dict() | {"model_type": "bert"}, "model type 'bert'"),
        ({"hidden_size": 8}, "model type None"),
    ],
    ids=["ESM-1b", "ESM-1", "BERT", "nothing"],
)
def test_what_is_not_esm2_is_refused(tmp_path: Path, config: dict[str, object], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for cls in (TurboEsmForMaskedLM, TurboEsmModel):
        with pytest.raises(ValueError, match=message):
            cls.from_pretrained(tmp_path)


def test_calibration_and_preset_at_loading(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Both classes take them; a calibration in the folder is found; another model's is refused."""
    model = tiny_model(preset=DEFAULT_PRESET)
    folder, path = tmp_path / "model", tmp_path / "calibration.safetensors"
    model.save_pretrained(folder)
    model.esm.calibration.save(path)
    bare = TurboEsmForMaskedLM.from_pretrained(folder)
    assert bare.esm.calibration is None
    ids, mask = random_ids([9, 5])
    with torch.no_grad():
        expected = model(ids, past_key_values=model(ids, mask, use_cache=True).past_key_values).logits
        with pytest.raises(ValueError, match="esm-turbo calibrate"):
            bare(ids, mask, use_cache=True)
        for calibration in (path, str(path), model.esm.calibration):
            loaded = TurboEsmForMaskedLM.from_pretrained(folder, calibration=calibration).eval()
            cache = loaded(ids, mask, use_cache=True).past_key_values
            assert torch.equal(loaded(ids, past_key_values=cache).logits, expected)
        base = TurboEsmModel.from_pretrained(folder, calibration=path, preset="exact", add_pooling_layer=False)
        assert base.turbo_config == PRESETS["exact"]
        shutil.copy(path, folder)
        assert TurboEsmForMaskedLM.from_pretrained(folder).esm.calibration is not None
        assert TurboEsmForMaskedLM.from_pretrained(folder, calibration=False).esm.calibration is None
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="weights are not this model's"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path / "other", calibration=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "turbo99"}, "`preset` must be one of"),
        ({"preset": TurboConfig(codec="zip")}, "`codec` must be one of"),
        ({"backend": "cuda"}, "`backend` must be one of"),
        ({"backend": "triton"}, "backend 'triton' cannot run"),
        ({"calibration": "nowhere.safetensors"}, "no such calibration file"),
    ],
    ids=str,
)
def test_wrong_options(tiny_model: MakeModel, tmp_path: Path, options: dict[str, object], message: str) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        TurboEsmForMaskedLM.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        model.set_turbo(**options)
    assert model.esm.turbo_config == PRESETS["exact"]


# ---------------------------------------------------------------- what a forward refuses


@pytest.fixture(scope="module")
def plain(tiny_model: MakeModel) -> TurboEsmForMaskedLM:
    return tiny_model()


@pytest.fixture
def cache(plain: TurboEsmForMaskedLM) -> TurboKVCache:
    with torch.no_grad():
        return plain(*random_ids([9, 5]), use_cache=True).past_key_values


def refuses(message: str, call: Callable[..., object], *args: object, **options: object) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(*args, **options)


IDS = torch.tensor([[CLS, 5, 6, 7], [CLS, 8, 9, 10]])

PREFILLS = {
    "left padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])}, "row 1 is padded on the left"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "row 0 is padded on the left or has"),
    "an empty row": ({"attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])}, "row 0 has no token"),
    "mask too long": ({"attention_mask": torch.ones(2, 5)}, r"`attention_mask` must be \[batch, n\] = \[2, 4\]"),
    "mask too short": ({"attention_mask": torch.ones(2, 3)}, "`attention_mask` must be"),
    "mask of one row": ({"attention_mask": torch.ones(1, 4)}, "`attention_mask` must be"),
    "mask of four dimensions": ({"attention_mask": torch.ones(2, 1, 4, 4)}, "`attention_mask` must"),
    "mask of other numbers": ({"attention_mask": torch.full((2, 4), 0.5)}, "zeros and ones"),
    "only masks": ({"input_ids": torch.tensor([[CLS, 5], [MASK, MASK]])}, "row 1 has no token but <mask>"),
    "only masks and padding": (
        {"input_ids": torch.tensor([[MASK, MASK, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])},
        "row 0 has no token but <mask>",
    ),
    "an id too large": ({"input_ids": torch.tensor([[CLS, 33]])}, "`input_ids` must lie in 0 to 32"),
    "a negative id": ({"input_ids": torch.tensor([[CLS, -1]])}, "`input_ids` must lie in 0 to 32"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"must be \[batch, n\] with n >= 1"),
    "no rows": ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, r"must be \[batch, n\]"),
    "one dimension": ({"input_ids": torch.tensor([CLS, 5])}, r"must be \[batch, n\]"),
    "no input": ({"input_ids": None}, "needs `input_ids`"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 64)}, "needs `input_ids`"),
    "embeddings too": ({"inputs_embeds": torch.zeros(2, 4, 64)}, "needs `input_ids`"),
    "ids that are no integers": ({"input_ids": torch.zeros(2, 4)}, "`input_ids` must be int64 or int32, got torch.f"),
    "positions that are no integers": ({"position_ids": torch.zeros(2, 4)}, "`position_ids` must be integers"),
    "positions of another length": ({"position_ids": torch.arange(5)[None]}, r"`position_ids` must be \[batch, 4\]"),
    "positions of another batch": ({"position_ids": torch.arange(4).repeat(3, 1)}, "`position_ids` must be"),
    "positions of one dimension": ({"position_ids": torch.arange(4)}, "`position_ids` must be"),
    "negative positions": ({"position_ids": torch.arange(4)[None] - 1}, "`position_ids` must not be negative"),
    "another kind of past": ({"past_key_values": ((torch.zeros(1),),)}, "must be a TurboKVCache, got tuple"),
}  # fmt: skip


@pytest.mark.parametrize("case", PREFILLS)
def test_a_prefill_refuses(plain: TurboEsmForMaskedLM, case: str) -> None:
    options, message = PREFILLS[case]
    refuses(message, plain, **({"input_ids": IDS, "use_cache": True} | options))
    refuses(message, plain.esm, **({"input_ids": IDS, "use_cache": True} | options))


NEW = torch.tensor([[5, 6, 7], [8, 9, 10]])

EXTENSIONS = {
    "too many rows": ({"input_ids": NEW[[0, 1, 1]]}, "the cache has 2 rows, the extension 3"),
    "too few rows": ({"input_ids": NEW[:1]}, "the cache has 2 rows, the extension 1"),
    "mask of another length": ({"attention_mask": torch.ones(2, 11)}, r"\[2, 3\] or \[batch, past \+ n\] = \[2, 12\]"),
    "mask of another batch": ({"attention_mask": torch.ones(1, 12)}, "`attention_mask` must be"),
    "mask of one dimension": ({"attention_mask": torch.ones(12)}, "`attention_mask` must have two dimensions"),
    "mask of other numbers": ({"attention_mask": torch.full((2, 12), 2)}, "zeros and ones"),
    "a mask that shows what is not there": (
        {"attention_mask": torch.ones(2, 12, dtype=torch.int64)},
        "shows past tokens that row 1 does not hold: it has 5",
    ),
    "left padding": ({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}, "row 1 is padded on the left"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "row 0 is padded on the left or has holes"),
    "a hole in the longer mask": (
        {"attention_mask": torch.tensor([[1] * 9 + [0, 1, 1], [1] * 5 + [0] * 4 + [1] * 3])},
        "row 0 is padded on the left or has holes",
    ),
    "only masks, nothing else seen": (
        {
            "input_ids": torch.full((2, 3), MASK),
            "attention_mask": torch.tensor([[0] * 9 + [1] * 3, [1] * 5 + [0] * 4 + [1] * 3]),
        },
        "row 0 has no token but <mask>",
    ),
    "an id too large": ({"input_ids": torch.tensor([[33], [5]])}, "`input_ids` must lie in 0 to 32"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "n >= 1"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 64)}, "needs `input_ids`"),
    "attentions": ({"output_attentions": True}, "`output_attentions` is not available"),
    "positions of another length": ({"position_ids": torch.arange(4)[None]}, r"`position_ids` must be \[batch, 3\]"),
    "positions of another batch": ({"position_ids": torch.arange(3).repeat(3, 1)}, "`position_ids` must be"),
    "negative positions": ({"position_ids": torch.tensor([[-1, 0, 1]])}, "`position_ids` must not be negative"),
    "an append mask of another shape": (
        {"use_cache": True, "append_mask": torch.ones(2, 4, dtype=torch.bool)}, "`append_mask` must be"),
    "an append mask that keeps padding": (
        {
            "use_cache": True,
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "append_mask": torch.ones(2, 3, dtype=torch.bool),
        },
        "`append_mask` keeps tokens that `attention_mask` hides",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTENSIONS)
def test_an_extension_refuses(plain: TurboEsmForMaskedLM, cache: TurboKVCache, case: str) -> None:
    options, message = EXTENSIONS[case]
    before = cache.nbytes
    refuses(message, plain, **({"input_ids": NEW, "past_key_values": cache} | options))
    refuses(message, plain.esm, **({"input_ids": NEW, "past_key_values": cache} | options))
    assert (cache.nbytes, cache.lengths.tolist()) == (before, [9, 5])


def test_many_rows_are_not_appended_to_one(plain: TurboEsmForMaskedLM) -> None:
    with torch.no_grad():
        cache = plain(IDS[:1], use_cache=True).past_key_values
    message = "cannot append 2 rows to a cache of one.*batch_repeat_interleave"
    refuses(message, plain, NEW, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [4]


def test_a_cache_under_grad(plain: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        plain(IDS, use_cache=True)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        plain(NEW, past_key_values=cache)
    assert plain(IDS).logits.requires_grad


def test_an_error_in_the_middle_leaves_the_cache_as_it_was(plain: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    """What is appended comes in at the end, for all layers at once."""
    handle = plain.esm.encoder.layer[1].register_forward_hook(lambda *_: 1 / 0)
    try:
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            plain(NEW, past_key_values=cache, use_cache=True)
    finally:
        handle.remove()
    assert cache.lengths.tolist() == [9, 5]
    assert {layer.columns for layer in cache.layers} == {9}


def test_an_empty_cache_of_another_model(plain: TurboEsmForMaskedLM, tiny_model: MakeModel) -> None:
    for other in (tiny_model(seed=1), tiny_model(layers=3)):
        refuses("another model|3 layers", plain, IDS, past_key_values=other.new_cache(), use_cache=True)


def test_eos_and_cls_are_the_protected_tokens(tiny_model: MakeModel) -> None:
    assert tiny_model().esm.special_ids == (CLS, EOS)


def test_presets_all_write_and_read(tiny_model: MakeModel) -> None:
    """Every preset there is, on ragged rows."""
    ids, mask = random_ids([12, 5], masks=1, eos=True)
    exact = tiny_model()
    with torch.no_grad():
        reference = exact(NEW, past_key_values=exact(ids, mask, use_cache=True).past_key_values).logits
        for name in PRESETS:
            model = tiny_model(preset=name, calibrated=True)
            cache = model(ids, mask, use_cache=True).past_key_values
            output: Tensor = model(NEW, past_key_values=cache).logits
            error = (output - reference).square().mean().sqrt() / reference.square().mean().sqrt()
            assert error < 0.5, name
            assert (error < 1e-5) == (name == "exact")
