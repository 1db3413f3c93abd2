"""Identities: what changes a model's results changes its identity, or nothing can be kept."""

import contextlib
import copy
import functools
import gc
import multiprocessing
import operator
import pickle
import weakref
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from peft import LoKrConfig, get_peft_model
from torch.nn.utils import parametrizations, parametrize
from transformers.models.esm import modeling_esm

from benchmarks.attack import identity as attack
from benchmarks.attack.model_changes import CHANGES, UNSEEN_IN_MEMORY
from esm_turbo import ContextStore, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.files import identity
from esm_turbo.files.identity import (
    ModelIdentity,
    agree,
    exact_identity,
    kept_digest,
    lasting_identity,
    model_identity,
    owned,
    same_outputs,
    seen_code,
    seen_identity,
    watch,
)
from esm_turbo.files.tensor_digests import sampled_views, tensors_digest
from esm_turbo.model import packed_encoder, plan
from esm_turbo.modeling_esm_turbo import TurboEsmLayer
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM
from esm_turbo.ops.copies import Gatherer
from tests.helpers.e1 import make_e1
from tests.helpers.models import make_esm, make_esmc

SEQUENCE = "MKTAYIAKQRQISFVK"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(dtype=torch.float32, layers=2, **options):
    return TurboEsmForMaskedLM.from_esm(make_esm(layers=layers, **options), preset="exact").to(dtype).eval()


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


@pytest.fixture(scope="module", params=attack.DTYPES)
def kept(request, tmp_path_factory):
    """What models with and without adapters have kept, by whether they have, and their dtype."""
    folders = {adapted: tmp_path_factory.mktemp("kept") for adapted in (False, True)}
    for adapted, folder in folders.items():
        attack.keep(attack.small_model(request.param, "adapter_" if adapted else ""), folder)
    return request.param, folders


def folder_of(change, folders):
    return folders[change.startswith("adapter_")]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_results_is_refused(kept, change):
    """By caches in memory, saved ones, stores and folders of embeddings."""
    dtype, folders = kept
    found = attack.run_change(change, dtype, folder_of(change, folders))
    assert len(found) >= 5
    assert all(end.startswith("refused") for end in found.values()), found


@pytest.mark.parametrize("change", [change for change in CHANGES if not change.startswith("adapter_")])
def test_what_a_changed_model_keeps_is_not_of_the_model(tmp_path, change):
    found = attack.run_undone(change, "float32", tmp_path)
    assert all(end.startswith("refused") for end in found.values()), found


def _ends(folders, dtype):
    """Of all changes, and of none, in a process of its own."""
    found = {change: attack.run_change(change, dtype, folder_of(change, folders)) for change in CHANGES}
    model = attack.small_model(dtype)
    return found, attack.outcomes(model, folders[False], functools.partial(attack.fresh_results, model))


@pytest.mark.slow
def test_another_process_refuses_what_changes_results(kept):
    dtype, folders = kept
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found, unchanged = pool.submit(_ends, folders, dtype).result(300)
    ends = [end for of_change in found.values() for end in of_change.values()]
    assert len(found) == len(CHANGES)
    assert all(end.startswith("refused") for end in ends), found
    assert set(unchanged.values()) == {"right"}


def test_another_dtype_is_named(kept):
    dtype, folders = kept
    other = {"float32": "float16", "bfloat16": "float32", "float16": "bfloat16"}[dtype]
    found = attack.outcomes(attack.small_model(other), folders[False], lambda name: None)
    contexts = [end for name, end in found.items() if name != "embeddings"]
    assert all(f"made in {dtype}, and the model computes in {other}" in end for end in contexts), found
    assert found["embeddings"].startswith("refused")


def test_a_file_is_compared_to_the_bit_at_its_first_use(tmp_path):
    model = attack.small_model("float32")
    model.prefill(SEQUENCE).save(tmp_path / "cache.safetensors")
    CHANGES["element"](model.model, ExitStack())
    with pytest.raises(ValueError, match="the weights differ"):
        model.extend(TurboKVCache.load(tmp_path / "cache.safetensors"), "GSG")


@pytest.mark.parametrize("change", UNSEEN_IN_MEMORY)
def test_what_a_cache_in_memory_does_not_see_is_not_saved(tmp_path, change):
    model = attack.small_model("float32")
    cache = model.prefill(SEQUENCE)
    with ExitStack() as undo:
        CHANGES[change](model.model, undo)
        with pytest.raises(ValueError, match="has changed since"):
            cache.save(tmp_path / "cache.safetensors")
    assert not list(tmp_path.iterdir())


def test_caches_without_their_model_are_not_saved(tmp_path):
    """Nothing tells whether it was changed before."""
    model = attack.small_model("float32")
    cache = model.prefill(SEQUENCE)
    cache.save(tmp_path / "cache.safetensors")
    copied = pickle.loads(pickle.dumps(cache))
    assert torch.isfinite(model.extend(copied, "GSG").logits).all()
    # A model has claimed it.
    copied.save(tmp_path / "copied.safetensors")
    copied = pickle.loads(pickle.dumps(cache))
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors")
    del model
    gc.collect()
    for one in (cache, copied):
        with pytest.raises(ValueError, match="does not exist here any more"):
            one.save(tmp_path / "other.safetensors")
    pickle.loads(pickle.dumps(loaded)).save(tmp_path / "other.safetensors")


@pytest.mark.parametrize("part", ["intermediate.dense", "LayerNorm", "attention"])
def test_modules_in_several_places_count_in_each(part):
    """Layers A, B, A, B, and A, B, B, A."""
    model, found = make(layers=4).esm, set()
    owner, _, name = part.rpartition(".")
    parts = [layer.get_submodule(part) for layer in model.encoder.layer[:2]]
    for order in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 1, 1)):
        for layer, index in zip(model.encoder.layer, order, strict=True):
            setattr(layer.get_submodule(owner), name, parts[index])
        found.add((exact_identity(model).forward, exact_identity(model).weights))
    assert len(found) == 3


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("context", [autocast, parametrize.cached])
def test_copies_of_former_weights_are_not_kept_as_of_later_ones(tmp_path, context):
    """Those that autocast and parametrizations keep within a block."""
    model = attack.small_model("float32")
    dense = model.model.esm.encoder.layer[0].intermediate.dense
    if context is not autocast:
        parametrizations.weight_norm(dense)
    with context(), torch.no_grad():
        model.score(SEQUENCE, ["GSG"], arm="frozen")
        next(dense.parameters()).mul_(3)
        if context is autocast:
            ContextStore(tmp_path).add(model, [SEQUENCE])
        else:
            with pytest.raises(ValueError, match=r"parametrize.cached is not code of a known library"):
                ContextStore(tmp_path).add(model, [SEQUENCE])
    with context() if context is autocast else nullcontext():
        [stored] = ContextStore(tmp_path).get(model, SEQUENCE)
        assert (stored is None) is (context is not autocast)
        if stored is not None:
            fresh = model.extend(model.prefill(SEQUENCE), "GSG").logits
            torch.testing.assert_close(model.extend(stored, "GSG").logits, fresh, rtol=0, atol=0)


def test_what_leaves_the_numbers_alone_refuses_nothing(turbo, kept):
    dtype, folders = kept
    for change in (
        lambda model: copy.deepcopy(model),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to("cpu").requires_grad_(False),
        lambda model: model.compile() or model,
        lambda model: model.train(),
    ):
        one = attack.small_model(dtype)
        model = change(one.model)
        loaded = TurboKVCache.load(folders[False] / "cache.safetensors", model=model)
        assert loaded.batch_size == 1
        assert ContextStore(folders[False] / "store").get(TurboEsm(model, turbo.tokenizer), SEQUENCE)[0] is not None


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_changes_nothing(turbo, kept, training):
    dtype, folders = kept
    one = in_turbo(attack.small_model(dtype).model.train(training), turbo)
    expected = one.extend(one.prefill(SEQUENCE), "GSG").logits
    one.model.gradient_checkpointing_enable()
    for cache in (one.prefill(SEQUENCE), TurboKVCache.load(folders[False] / "cache.safetensors", model=one.model)):
        assert torch.equal(one.extend(cache, "GSG").logits, expected)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_other_code_in_the_place_of_checkpointing_is_refused(turbo):
    def double(module, input, output):
        return 2 * output

    # As the library's own hook is named.
    double.__module__, double.__qualname__ = "transformers.modeling_utils", "make_inputs_require_grads"
    contexts = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
    for change in (
        lambda model: model.get_input_embeddings().register_forward_hook(double),
        lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=contexts),
    ):
        one = in_turbo(make(), turbo)
        change(one.model)
        with pytest.raises(ValueError, match="is not code of a known library"):
            one.prefill(SEQUENCE)


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
        with pytest.raises(ValueError, match="there are hooks of all modules"):
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


def test_kernels_and_graphs_run_only_what_they_replace():
    """They would compute what the library's functions do, whatever stands in their place."""
    model = attack.small_model("float32").model
    executor = model.esm.executor
    assert not executor.runs_known_code()
    model_identity(model.esm)
    assert executor.runs_known_code()
    for change in ("function", "library_functional", "class_forward", "code_object", "function_mode"):
        with ExitStack() as undo:
            CHANGES[change](model, undo)
            model_identity(model.esm)
            assert not executor.runs_known_code()
        model_identity(model.esm)
        assert executor.runs_known_code()
    _, options = seen_code(model.esm)
    remembered = packed_encoder._layers(model.esm.encoder)
    assert packed_encoder._layers(model.esm.encoder) is remembered
    CHANGES["eps"](model, ExitStack())
    model_identity(model.esm)
    assert seen_code(model.esm)[1] != options
    assert packed_encoder._layers(model.esm.encoder)[1].norms[0][2] == 1e-2
    # The model as a whole is in evaluation mode.
    CHANGES["whole_dropout"](model, ExitStack())
    model_identity(model.esm)
    assert not executor.runs_known_code()


def test_slopes_drawn_at_random_cannot_be_kept(turbo):
    one = in_turbo(make(), turbo)
    layer = one.model.esm.encoder.layer[0].intermediate
    layer.dense = torch.nn.Sequential(layer.dense, torch.nn.RReLU()).eval()
    one.prefill(SEQUENCE)
    one.model.train()
    with pytest.raises(ValueError, match=r"\.eval\(\)"):
        one.prefill(SEQUENCE)


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


def test_dropout_of_each_adapter_counts(turbo):
    """PEFT's LoKr and LoHa hold their rates in dictionaries."""
    one = in_turbo(make(), turbo)
    config = LoKrConfig(target_modules=["query"], r=2, rank_dropout=0.5, init_weights=False)
    adapted = get_peft_model(one.model, config)
    adapted.eval()
    one.prefill(SEQUENCE)
    adapted.train()
    with pytest.raises(ValueError, match=r"with dropout in .*query.*\.eval\(\)"):
        one.prefill(SEQUENCE)


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


def test_the_order_in_which_tensors_were_registered_does_not_count(model):
    before = model_identity(model)
    for module in model.modules():
        module._parameters = dict(reversed(module._parameters.items()))
    assert not exact_identity(model).difference(before)


def test_large_writes_without_a_trace_are_noticed(model):
    before = model_identity(model)
    assert not watch(model, Gatherer)()
    assert model_identity(model) is before
    data = model.get_parameter(TENSORS[4]).data
    data.view(-1)[data.numel() // 2 :][: -(-data.numel() // 16)].add_(0.5)
    assert model_identity(model, sampled=False) is before
    assert watch(model, Gatherer)()
    assert seen_identity(model).difference(before) == "the weights differ"


STORED = {
    "whole": lambda x: x,
    "transposed": lambda x: x.flatten(1).t(),
    "rows": lambda x: x[7:91],
    "columns": lambda x: x[:, 5:40],
    "every third column": lambda x: x.flatten(1)[:, ::3],
    "part of a part": lambda x: x[3:70, 5:40, 2:],
    "expanded": lambda x: x[:, :1].expand(-1, 50, -1),
}


@pytest.mark.parametrize("stored", STORED)
def test_a_sample_misses_no_large_write_however_a_tensor_lies(stored):
    x = STORED[stored](torch.zeros(96, 50, 3))
    views = [view for group in sampled_views([x]) for view in group]
    assert 32 <= sum(map(len, views)) <= 90
    # In the order in which it lies, and an element more where a large part ends between two rows.
    order = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    for begin in range(32):
        x.zero_()
        part = order.clone().flatten()
        part[begin * len(part) // 32 : (begin + 1) * len(part) // 32 + 1] = 1
        order.copy_(part.view(order.shape)) if stored != "expanded" else x.fill_(1)
        assert any(view.any() for view in views)


@pytest.mark.parametrize("stored", ["whole", "transposed", "columns of a larger one"])
@pytest.mark.parametrize("rows", [80, 256, 1000])
def test_a_sample_lies_in_all_parts_of_a_matrix(stored, rows):
    makers = {
        "whole": lambda: torch.zeros(rows, 256),
        "transposed": lambda: torch.zeros(256, rows).t(),
        "columns of a larger one": lambda: torch.zeros(rows, 512)[:, 100:356],
    }
    x = makers[stored]()
    views = [view for group in sampled_views([x]) for view in group]
    for dim in range(2):
        for part in x.chunk(8, dim):
            x.zero_()
            part.fill_(1)
            assert any(view.any() for view in views)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_of_fused_optimizers_are_noticed(model, optimizer):
    before, other = model_identity(model), make().esm
    of_other = model_identity(other)
    weight = model.get_parameter(TENSORS[4])
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(-1)[7] = 1
    optimizer([weight], lr=0.1, fused=True).step()
    assert model_identity(model, sampled=False).difference(before) == "the weights differ"
    assert model_identity(other, sampled=False) is of_other


@pytest.mark.parametrize("fails", [False, True])
def test_steps_are_noticed_before_they_end(model, fails):
    before, found = model_identity(model), []
    weight = model.get_parameter(TENSORS[4])
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(-1)[7] = 1
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def after(*_: object) -> None:
        found.append(model_identity(model, sampled=False).difference(before))
        if fails:
            raise RuntimeError("stopped")

    optimizer.register_step_post_hook(after)
    with pytest.raises(RuntimeError, match="stopped") if fails else contextlib.nullcontext():
        optimizer.step()
    assert found == ["the weights differ"]


@pytest.mark.parametrize("gather", [None, Gatherer])
def test_changes_are_told_of_the_time_when_one_began_to_watch(model, gather):
    before = model_identity(model)
    assert not watch(model, gather)()
    changed = watch(model, gather)
    with torch.no_grad():
        model.get_parameter(TENSORS[4]).mul_(2)
    assert changed()
    assert seen_identity(model).difference(before) == "the weights differ"
    assert not watch(model, gather)()
    data = model.get_parameter(TENSORS[4]).data
    data.view(-1)[data.numel() // 2 :][: -(-data.numel() // 16)].add_(0.5)
    assert watch(model, gather)()


def test_a_model_that_nobody_else_reaches_is_read_once(model):
    with owned(model):
        first = exact_identity(model)
        assert exact_identity(model) is first
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        assert exact_identity(model).difference(first)
        last = exact_identity(model)
    # A single value, which leaves no trace.
    next(model.parameters()).data.view(-1)[5] += 1
    assert exact_identity(model).difference(last)


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


def test_compiled_modules_are_refused(turbo):
    one = in_turbo(make(), turbo)
    layer = one.model.esm.encoder.layer[0].intermediate
    layer.dense = torch.jit.script(layer.dense)
    with pytest.raises(ValueError, match=r"layer.0.intermediate.dense is compiled by TorchScript"):
        one.score(SEQUENCE, ["GSG"], arm="frozen")


def test_a_layer_that_torch_wraps_to_compile_it_makes_no_context(turbo):
    one = in_turbo(make(), turbo)
    [right] = one.embed(SEQUENCE, include=["mean"])
    layers = one.model.esm.encoder.layer
    layers[0] = torch.compile(layers[0], backend="eager")
    [found] = one.embed(SEQUENCE, include=["mean"])
    for layer, mean in right.mean_representations.items():
        assert (found.mean_representations[layer] - mean).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="is not code of a known library"):
        one.prefill(SEQUENCE)


OBJECTS = {
    "scripted": lambda slope: torch.jit.script(torch.nn.functional.leaky_relu),
    "module": torch.nn.LeakyReLU,
    "method": lambda slope: torch.nn.LeakyReLU(slope).forward,
    "method_of_tensor": lambda slope: torch.full((64,), slope).mul,
    "partial": lambda slope: functools.partial(torch.nn.functional.leaky_relu, negative_slope=slope),
    "partial_method": lambda slope: functools.partialmethod(torch.nn.functional.leaky_relu, slope),
    "caller": lambda slope: operator.methodcaller("clamp", slope),
}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize(("owner", "name"), [(modeling_esm, "gelu"), (modeling_esm.EsmIntermediate, "forward")])
def test_objects_that_hold_numbers_are_not_known_by_their_class(model, monkeypatch, kind, owner, name):
    monkeypatch.setattr(owner, name, OBJECTS[kind](0.5))
    with pytest.raises(ValueError, match="is not code of a known library"):
        lasting_identity(model)


def _generator():
    @contextlib.contextmanager
    def block():
        yield

    return block()


@pytest.mark.parametrize("decorate", [torch.autocast("cpu", torch.bfloat16), functools.singledispatch, _generator()])
@pytest.mark.parametrize("owner", [modeling_esm.EsmIntermediate, TurboEsmLayer])
def test_decorators_of_libraries_that_hold_objects_are_not_known(model, monkeypatch, owner, decorate):
    """Nor around this package's own functions, whose names they take."""
    monkeypatch.setattr(owner, "forward", decorate(owner.forward))
    with pytest.raises(ValueError, match="forward, is not code of a known library"):
        lasting_identity(model)


def test_what_a_configuration_computes_is_a_part_of_the_code():
    """E1 asks its own which layers see one sequence alone."""
    model = make_e1()
    before = model_identity(model.model)

    class Reversed(type(model.config)):
        layer_kinds = property(lambda self: super().layer_kinds[::-1])

    model.config.__class__ = Reversed
    found = model_identity(model.model)
    assert "Reversed" in found.foreign and before.difference(found)


def test_the_attention_of_e1_is_code_of_its_forward(monkeypatch):
    model, attend = make_e1(), plan.scaled_dot_product_attention
    before = model_identity(model.model)
    monkeypatch.setattr(plan, "scaled_dot_product_attention", lambda *args, **options: attend(*args, **options))
    assert before.difference(model_identity(model.model))


def test_what_computes_a_configuration_of_this_package_is_watched(monkeypatch):
    model = make_e1()
    before = model_identity(model.model)
    monkeypatch.setattr(type(model.config), "layer_kinds", property(lambda self: ()))
    assert before.difference(model_identity(model.model))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["ESM-2", "ESM-C", "E1"])
def test_a_probe_allows_what_only_rounds_otherwise(family, dtype):
    makers = {"ESM-2": make, "ESM-C": lambda: TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact"), "E1": make_e1}
    model = makers[family]().to(dtype).eval().base_model
    before, other = exact_identity(model), copy.deepcopy(model)
    other.config._attn_implementation = "eager"
    with one_thread_more():
        found = exact_identity(other).probe
    assert same_outputs(found, before.probe, before.precision)
    x = torch.frombuffer(bytearray.fromhex(found)[:-4], dtype=torch.float32)
    assert len(x) == 64
    for change, same in ((1e-4, True), (1.0, False)):
        changed = x + change * x.abs().max() * torch.eye(64)[5]
        data = changed.numpy().tobytes()
        text = (data + zlib.crc32(data).to_bytes(4, "little")).hex()
        assert same_outputs(found, text, before.precision) is same


@pytest.mark.parametrize("at", [0, 100, 511, 512, 519])
def test_damage_to_a_probe_is_no_rounding(model, at):
    """Not even where a tolerance would let it through, nor as NaN."""
    probe = exact_identity(model).probe
    assert len(probe) == 2 * 4 * 65
    for other in set("0123456789abcdefg") - {probe[at]}:
        assert not same_outputs(probe[:at] + other + probe[at + 1 :], probe, "float32")
    assert same_outputs(probe[:at], probe, "float32") is (at == 0)


@contextlib.contextmanager
def one_thread_more():
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def test_files_without_a_probe_are_compared_by_their_digests(model):
    identity = exact_identity(model)
    older = {name: value for name, value in identity.to_dict().items() if name != "probe"}
    assert not ModelIdentity.from_dict(older).difference(identity)
    assert ModelIdentity.from_dict(identity.to_dict()) == identity


def test_a_model_is_probed_again_where_files_are_opened(tmp_path):
    turbo = attack.small_model("float32")
    store, path = tmp_path / "store", tmp_path / "cache.safetensors"
    ContextStore(store).get_or_prefill(turbo, SEQUENCE)
    cache = turbo.prefill(SEQUENCE)
    cache.save(path)
    uses = [
        lambda: ContextStore(store).get(turbo, SEQUENCE),
        lambda: turbo.extend(TurboKVCache.load(path), "GSG"),
        lambda: cache.save(tmp_path / "other.safetensors"),
    ]
    for use in uses:
        use()
    for use in uses:
        with ExitStack() as undo:
            CHANGES["kernel"](turbo.model, undo)
            with pytest.raises(ValueError, match="the same weights and code give other outputs"):
                use()
        exact_identity(turbo.model.esm)
        turbo.extend(turbo.prefill(SEQUENCE), "GSG")


def test_probes_of_many_threads_leave_nothing_uncompiled(model):
    models = [copy.deepcopy(model) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: [one.executor.sampled_outputs() for _ in range(10)], models))
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    assert compiled


def test_looking_at_a_model_scales_no_embeddings(model):
    words = model.embeddings.word_embeddings
    words.max_norm = 0.5 * float(words.weight.norm(dim=1).max())
    before = words.weight.detach().clone()
    assert not exact_identity(model).probe
    assert torch.equal(words.weight, before)


def test_looking_at_a_model_in_training_mode_trains_nothing(tmp_path):
    turbo = attack.small_model("float32")
    encoder = turbo.model.esm
    for layer in encoder.encoder.layer:
        parametrizations.spectral_norm(layer.intermediate.dense)
    for module in turbo.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    turbo.model.train()
    before = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    exact_identity(encoder)
    ContextStore(tmp_path).get(turbo, SEQUENCE)
    after = dict(encoder.named_buffers())
    assert len(before) > 4 and all(torch.equal(buffer, after[name]) for name, buffer in before.items())


def test_a_first_context_is_computed_and_looked_at_once(model, monkeypatch):
    looks = []
    look = identity._look
    monkeypatch.setattr(identity, "_look", lambda seen: looks.append(seen) or look(seen))
    with torch.no_grad():
        model(torch.arange(4, 12)[None], use_cache=True)
    assert not model.kv.refresh_fingerprint()
    assert looks == [model]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-3), ("float32+float64", 1e-3), ("float64", 1e-3), ("float32-tf32", 0.15), ("bfloat16", 0.15)],
)
def test_outputs_agree_to_the_rounding_of_their_precision(precision, tolerance):
    outputs = torch.tensor([0.0, -2.0])
    assert agree(outputs, outputs + 1.8 * tolerance, precision)
    assert not agree(outputs, outputs + 2.2 * tolerance, precision)


def test_unknown_code_is_not_probed(model):
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    assert not exact_identity(model).probe and not calls


def test_hooks_that_accelerate_joins_are_judged(model):
    class Doubled(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    dense = model.encoder.layer[0].intermediate.dense
    add_hook_to_module(dense, AlignDevicesHook("cpu"))
    assert not lasting_identity(model).foreign
    add_hook_to_module(dense, Doubled(), append=True)
    with pytest.raises(ValueError, match="is not code of a known library"):
        lasting_identity(model)
