"""Identities: what changes a model's results changes its identity, or nothing can be kept."""

import copy
import functools
import gc
import itertools
import multiprocessing
import pickle
import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from transformers.models.esm import modeling_esm

from esm_turbo import ContextStore, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.files.identity import (
    ModelIdentity,
    exact_identity,
    kept_digest,
    lasting_identity,
    model_identity,
)
from esm_turbo.files.tensor_digests import tensors_digest
from esm_turbo.ops.copies import Gatherer
from tests.helpers.models import make_esm

SEQUENCE = "MKTAYIAKQRQISFVK"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(dtype=torch.float32, **options):
    return TurboEsmForMaskedLM.from_esm(make_esm(layers=2, **options), preset="exact").to(dtype).eval()


@pytest.fixture
def model():
    return make().esm


def in_turbo(model, turbo):
    return TurboEsm(model, turbo.tokenizer)


TENSORS = [
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.key.bias",
    "encoder.layer.1.attention.output.dense.weight",
    "encoder.layer.1.attention.LayerNorm.weight",
    "encoder.layer.0.intermediate.dense.weight",
    "rotary_embeddings.inv_freq",
]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_tensor_counts(name, dtype):
    model = make(dtype).esm
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name].data
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
    seen = {exact_identity(model).weights}
    for place in (0, len(bits) // 2, len(bits) - 1):
        # As numpy would, without a trace.
        bits[place] ^= 1
        seen.add(exact_identity(model).weights)
        bits[place] ^= 1
        assert exact_identity(model).weights in seen
    assert len(seen) == 4


def test_the_digest_depends_on_order_names_and_shapes():
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0))
    others = [x.flip(0), x.flip(1), x.T, x.reshape(70, 40), x.double(), -x, x[:-1]]
    digests = {tensors_digest([("a", one)]) for one in [x, *others]} | {tensors_digest([("b", x)])}
    assert len(digests) == len(others) + 2
    assert tensors_digest([("a", x)]) == tensors_digest([("a", x.clone())])
    # Chunks of words that change places, beyond what is summed together.
    long = torch.arange(1 << 18, dtype=torch.float32)
    assert tensors_digest([("a", long)]) != tensors_digest([("a", long.roll(1 << 15))])


def _eps(model, patch):
    model.esm.encoder.layer[1].attention.LayerNorm.eps = 1e-2


def _token_dropout(model, patch):
    model.esm.embeddings.token_dropout = False


def _mask_token(model, patch):
    model.esm.embeddings.mask_token_id = 4


def _attention_scaling(model, patch):
    model.esm.rotary_embeddings.attention_scaling = 1.5


def _configuration(model, patch):
    model.esm.config.layer_norm_eps = 1e-2


def _function(model, patch):
    patch.setattr(modeling_esm, "gelu", torch.nn.functional.relu)


def _inner_function(model, patch):
    patch.setattr(modeling_esm, "rotate_half", lambda x: x)


def _class(model, patch):
    forward = modeling_esm.EsmIntermediate.forward
    patch.setattr(modeling_esm.EsmIntermediate, "forward", lambda self, x: 1.1 * forward(self, x))


def _wrapped_class(model, patch):
    forward = modeling_esm.EsmIntermediate.forward

    @functools.wraps(forward)
    def wrapped(self, x):
        return 1.1 * forward(self, x)

    patch.setattr(modeling_esm.EsmIntermediate, "forward", torch.no_grad()(wrapped))


def _instance(model, patch):
    dense = model.esm.encoder.layer[0].output.dense
    dense.forward = lambda x: 2 * torch.nn.functional.linear(x, dense.weight)


def _partial(model, patch):
    dense = model.esm.encoder.layer[0].output.dense
    dense.forward = functools.partial(torch.nn.functional.linear, weight=2 * dense.weight.detach())


def _hook(model, patch):
    model.esm.encoder.layer[0].register_forward_hook(lambda *_: None)


def _pre_hook(model, patch):
    model.esm.encoder.layer[0].attention.register_forward_pre_hook(lambda *_: None)


def _functional(model, patch):
    patch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: x @ w.T)


def _feed_forward(model, patch):
    weight = model.esm.encoder.layer[0].intermediate.dense.weight
    with torch.no_grad():
        # What moves 16-bit weights, too.
        weight.add_(weight.abs().clamp_min(3e-4) * weight.sign(), alpha=0.02)


def _element(model, patch):
    model.esm.encoder.layer[0].intermediate.dense.weight.data.view(-1)[7] += 1


def _numpy(model, patch):
    weight = model.esm.encoder.layer[0].intermediate.dense.weight.detach()
    weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()]).numpy()[3] ^= 1


def _buffer(model, patch):
    model.esm.rotary_embeddings.inv_freq.mul_(1.01)


def _replaced(model, patch):
    old = model.esm.encoder.layer[0].output.dense
    model.esm.encoder.layer[0].output.dense = torch.nn.Sequential(old, torch.nn.Tanh())


def _activation(model, patch):
    model.esm.encoder.layer[0].intermediate.register_forward_hook(lambda module, args, output: output.relu())


# Those of one element are noticed wherever something is kept; in memory it is the line that is documented.
UNSEEN_IN_MEMORY = [_element, _numpy, _functional]
CHANGES = [
    _eps,
    _token_dropout,
    _mask_token,
    _attention_scaling,
    _configuration,
    _function,
    _inner_function,
    _class,
    _wrapped_class,
    _instance,
    _partial,
    _hook,
    _pre_hook,
    _feed_forward,
    _buffer,
    _replaced,
    _activation,
    *UNSEEN_IN_MEMORY,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_results_is_refused(turbo, tmp_path, monkeypatch, change, dtype):
    """By caches in memory, saved ones, and stores; back as it was, the model reads them again."""
    model = make(dtype)
    one = in_turbo(model, turbo)
    cache, store = one.prefill(SEQUENCE), ContextStore(tmp_path / "store")
    cache.save(tmp_path / "cache.safetensors")
    store.get_or_prefill(one, SEQUENCE)
    expected = one.extend(cache, "GSG").logits
    with monkeypatch.context() as patch:
        change(model, patch)
        if change not in UNSEEN_IN_MEMORY:
            with pytest.raises(ValueError, match="belongs to another model"):
                one.extend(cache, "GSG")
        with pytest.raises(ValueError, match=r"another model|cannot be kept"):
            one.extend(TurboKVCache.load(tmp_path / "cache.safetensors"), "GSG")
            TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
        with pytest.raises(ValueError, match=r"another model|cannot be kept"):
            TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
        for use in (store.get, store.get_or_prefill, store.add):
            with pytest.raises(ValueError, match=r"another model|cannot be kept"):
                use(one, SEQUENCE if use != store.add else [SEQUENCE])
        with pytest.raises(ValueError, match=r"has changed since|cannot be kept|another model"):
            cache.save(tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()
    other = in_turbo(make(dtype), turbo)
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors", model=other.model)
    torch.testing.assert_close(other.extend(loaded, "GSG").logits, expected, rtol=0, atol=0)
    assert store.get(other, SEQUENCE)[0] is not None


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_global_hook_is_refused(turbo, kind):
    one = in_turbo(make(), turbo)
    cache = one.prefill(SEQUENCE)
    register = {
        "forward": torch.nn.modules.module.register_module_forward_hook,
        "pre": torch.nn.modules.module.register_module_forward_pre_hook,
    }[kind]
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="a global forward hook"):
            one.extend(cache, "GSG")
        with pytest.raises(ValueError, match="a global forward hook"):
            one.prefill(SEQUENCE)
    finally:
        handle.remove()
    assert torch.isfinite(one.extend(cache, "GSG").logits).all()


def test_unknown_code_runs_within_a_call_and_is_kept_under_a_name(turbo, tmp_path):
    one = in_turbo(make(), turbo)
    plain = one.score(SEQUENCE, ["GSG"], arm="frozen")
    one.model.esm.encoder.layer[1].output.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    steered = one.score(SEQUENCE, ["GSG"], arm="frozen")
    assert abs(steered.scores[0].mean_log_probability - plain.scores[0].mean_log_probability) > 1e-4
    with pytest.raises(ValueError, match=r"is not code of a known library.*`model_id`"):
        one.prefill(SEQUENCE)
    one.model.model_id = "rolled by 1"
    assert one.model.esm.model_id == copy.deepcopy(one.model).model_id == "rolled by 1"
    one.prefill(SEQUENCE).save(tmp_path / "cache.safetensors")
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors", model=one.model)
    assert loaded.batch_size == 1
    one.model.model_id = "rolled by 2"
    with pytest.raises(ValueError, match="other code runs in its forward"):
        TurboKVCache.load(tmp_path / "cache.safetensors", model=one.model)


def test_models_are_loaded_under_a_name(tmp_path):
    library = make_esm(layers=2)
    assert TurboEsmForMaskedLM.from_esm(library).model_id is None
    assert TurboEsmForMaskedLM.from_esm(library, model_id="steered").esm.model_id == "steered"
    library.save_pretrained(tmp_path)
    assert TurboEsmForMaskedLM.from_pretrained(tmp_path, model_id="steered").model_id == "steered"
    turbo = TurboEsm.from_pretrained(model_id="steered", device="cpu")
    turbo.model.esm.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert turbo.prefill(SEQUENCE).identity.foreign == ""
    for name in ("", " ", 3):
        with pytest.raises(ValueError, match="`model_id` must be a name or None"):
            turbo.model.model_id = name
    assert turbo.model.model_id == "steered"


@pytest.mark.parametrize("module", ["embeddings.dropout", "encoder.layer.0.attention.self"])
def test_random_contexts_cannot_be_kept(turbo, tmp_path, module):
    """Those of training mode with dropout; without dropout, training mode makes no difference."""
    one = in_turbo(make(), turbo)
    one.model.train()
    cache = one.prefill(SEQUENCE)
    setattr(one.model.esm.get_submodule(module), "dropout" if module.endswith("self") else "p", 0.1)
    for use in (
        lambda: one.prefill(SEQUENCE),
        lambda: one.extend(cache, "GSG"),
        lambda: ContextStore(tmp_path / "store").add(one, [SEQUENCE]),
        lambda: one.model(torch.tensor([[0, 5, 6]]), use_cache=True),
        lambda: cache.save(tmp_path / "cache.safetensors"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=r"\.eval\(\)|options of its modules differ"):
            use()
    assert not list(tmp_path.glob("**/*.safetensors"))
    one.model.eval()
    assert torch.isfinite(one.extend(one.prefill(SEQUENCE), "GSG").logits).all()


def _read(folder, dtype, change):
    turbo = TurboEsm.from_pretrained()
    model = make(getattr(torch, dtype))
    if change == "trains":
        model.esm.embeddings.dropout.p = 0.1
    one = TurboEsm(model, turbo.tokenizer)
    if change == "trains":
        model.train()
    elif change is not None:
        globals()[change](model, None)
    try:
        return "right" if ContextStore(folder).get(one, SEQUENCE)[0] is not None else "absent"
    except ValueError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_store_is_refused_in_another_process(turbo, tmp_path, dtype):
    store = ContextStore(tmp_path)
    store.add(in_turbo(make(getattr(torch, dtype)), turbo), [SEQUENCE])
    other = {"float32": "float16", "bfloat16": "float32", "float16": "bfloat16"}[dtype]
    cases = [(dtype, None), (other, None), (dtype, "trains"), *((dtype, change.__name__) for change in CHANGES[:5])]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        right, precision, random, *changed = pool.map(_read, itertools.repeat(tmp_path), *zip(*cases, strict=True))
    assert right == "right"
    assert f"made in {dtype}, and the model computes in {other}" in precision
    assert ".eval()" in random
    assert all("options of its modules differ" in one for one in changed)


def test_the_identity_is_the_same_object_while_nothing_changes(model):
    before = model_identity(model)
    assert model_identity(model) is before
    assert exact_identity(model) is before
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert model_identity(model) is before
    with torch.no_grad():
        model.get_parameter(TENSORS[4]).mul_(2)
    assert model_identity(model).difference(before) == "the weights differ"
    with torch.no_grad():
        model.get_parameter(TENSORS[4]).div_(2)
    assert not model_identity(model).difference(before)


def test_large_writes_without_a_trace_are_noticed(model):
    before = model_identity(model, gather=Gatherer)
    assert model_identity(model, sampled=True, gather=Gatherer) is before
    data = model.get_parameter(TENSORS[4]).data
    data.view(-1)[data.numel() // 2 :][: -(-data.numel() // 16)].add_(0.5)
    assert model_identity(model, sampled=False) is before
    assert model_identity(model, sampled=True, gather=Gatherer).difference(before) == "the weights differ"


def test_copies_and_freed_models(model):
    before = model_identity(model)
    twin = copy.deepcopy(model)
    assert not model_identity(twin).difference(before)
    with torch.no_grad():
        twin.get_parameter(TENSORS[0]).mul_(2)
    assert model_identity(twin).difference(before)
    gone = weakref.ref(twin)
    del twin
    gc.collect()
    assert gone() is None
    assert pickle.loads(pickle.dumps(before)) == before
    assert ModelIdentity.from_dict(before.to_dict()) == before


def test_what_decides_no_result_does_not_count(model):
    before = exact_identity(model)
    with torch.no_grad():
        for parameter in model.contact_head.parameters():
            parameter.mul_(2)
    model.config._name_or_path = "elsewhere"
    model.config.use_cache = False
    assert not exact_identity(model).difference(before)


def test_digests_of_results(turbo):
    model = make()
    assert kept_digest(model) == kept_digest(make()) != kept_digest(make(seed=1))
    assert kept_digest(model) != kept_digest(make(torch.bfloat16))
    model.register_forward_hook(lambda *_: None)
    assert kept_digest(model) != kept_digest(model)
    with pytest.raises(ValueError, match="cannot be kept"):
        lasting_identity(model)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning", "ignore::UserWarning")
def test_packed_weights_are_refused(turbo):
    model = make()
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    one = in_turbo(model, turbo)
    for use in (lambda: one.prefill(SEQUENCE), lambda: one.score(SEQUENCE, ["GSG"], arm="frozen")):
        with pytest.raises(ValueError, match="whose weights are packed"):
            use()
