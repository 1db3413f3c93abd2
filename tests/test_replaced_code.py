"""Code of the library that was replaced, or hooked: what contexts compute with it is right, or refused."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import EsmForMaskedLM, EsmTokenizer, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertIntermediate, BertLayer
from transformers.models.esm import modeling_esm
from transformers.models.esmc import modeling_esmc

from esm_turbo import ContextStore, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.evaluate.contexts import prefill
from esm_turbo.evaluate.protocols import extend_each_token
from esm_turbo.files import forward_code
from esm_turbo.files.identity import model_identity
from esm_turbo.model.executor import Executor
from esm_turbo.model.masked_lm import CachedMaskedLM
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM
from esm_turbo.tasks.common.forwards import FROZEN
from tests.helpers.e1 import make_e1, random_row
from tests.helpers.models import make_esm, make_esmc, random_ids

Patch = pytest.MonkeyPatch
ESMC_MINI = Path(__file__).parents[1] / "models" / "esmc-mini"
MODELS: dict[str, Callable[[], CachedMaskedLM]] = {
    "ESM-2": lambda: TurboEsmForMaskedLM.from_esm(make_esm(), preset="exact"),
    "ESM-C": lambda: TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact"),
}


@torch.no_grad()
def largest_difference(model: CachedMaskedLM) -> float:
    """Between a whole forward, and every token in turn after a context of all others, by the largest logit."""
    ids, mask = random_ids([40], masks=0)
    whole, caches = prefill(model, [FROZEN], ids, mask)
    found = extend_each_token(model, caches[FROZEN], ids[0])
    expected = model(ids, mask)
    assert torch.equal(expected.logits, whole.logits)
    return float(abs(torch.from_numpy(found.logits) - whole.logits[0]).max() / whole.logits.abs().max())


def sine_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns the sine of its result, or of the first of its results."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0].sin(), *result[1:]) if isinstance(result, tuple) else result.sin()

    return changed


REPLACED = {
    "ESM-2": [
        (modeling_esm, "gelu"),
        (modeling_esm, "rotate_half"),
        (modeling_esm, "apply_rotary_pos_emb"),
        (modeling_esm.EsmIntermediate, "forward"),
        (modeling_esm.EsmOutput, "forward"),
        (modeling_esm.EsmLayer, "forward"),
    ],
    "ESM-C": [
        (modeling_esmc, "rotate_half"),
        (modeling_esmc, "apply_rotary_pos_emb"),
        (modeling_esmc.EsmcMLP, "forward"),
        (modeling_esmc.EsmcLayer, "forward"),
    ],
}


@pytest.mark.parametrize(
    ("family", "owner", "name"), [(family, *one) for family, replaced in REPLACED.items() for one in replaced]
)
def test_replaced_functions_compute_what_contexts_are_read_with(
    monkeypatch: Patch, family: str, owner: Any, name: str
) -> None:
    model = MODELS[family]()
    ids, mask = random_ids([40], masks=0)
    with torch.no_grad():
        before = model(ids, mask).logits
    assert largest_difference(model) < 1e-4
    monkeypatch.setattr(owner, name, sine_of(getattr(owner, name)))
    with torch.no_grad():
        assert (model(ids, mask).logits - before).abs().max() > 1e-2
    assert largest_difference(model) < 1e-4


@pytest.mark.parametrize("replacement", [torch.relu, torch.nn.functional.silu, modeling_esmc.rotate_half])
def test_functions_of_known_libraries_are_not_taken_for_the_models_own(monkeypatch: Patch, replacement: Any) -> None:
    name = "rotate_half" if replacement is modeling_esmc.rotate_half else "gelu"
    monkeypatch.setattr(modeling_esm, name, replacement)
    model = MODELS["ESM-2"]()
    assert largest_difference(model) < 1e-4
    assert not model.base_model.executor.runs_known_code()


@pytest.mark.parametrize("family", [*MODELS, "E1"])
@pytest.mark.parametrize(("owner", "name"), [(torch.Tensor, "cos"), (torch.Tensor, "sin"), (torch, "cat")], ids=str)
@torch.no_grad()
def test_methods_that_rotary_embeddings_call_are_looked_at(
    monkeypatch: Patch, family: str, owner: Any, name: str
) -> None:
    model: Any = MODELS.get(family, make_e1)()
    model.set_turbo(preset="exact")
    ids = torch.tensor([[1, 5, 6, 7]])
    cache = model(ids, use_cache=True).past_key_values
    monkeypatch.setattr(owner, name, sine_of(getattr(owner, name)))
    with pytest.raises(ValueError, match="the cache belongs to another model"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("family", MODELS)
def test_a_model_as_published_runs_known_code(family: str) -> None:
    model = MODELS[family]()
    assert largest_difference(model) < 1e-4
    assert model.base_model.executor.runs_known_code()


def _exchanged(layers: nn.ModuleList) -> list[nn.Module]:
    return [layers[1], layers[0]]


def _shared(layers: nn.ModuleList) -> list[nn.Module]:
    return [layers[0], layers[0]]


def _copied(layers: nn.ModuleList) -> list[nn.Module]:
    return [layers[0], copy.deepcopy(layers[0])]


@pytest.mark.parametrize(("family", "layers"), [("ESM-2", "esm.encoder.layer"), ("ESM-C", "esmc.layers")])
@pytest.mark.parametrize("change", [_exchanged, _shared, _copied])
def test_layers_in_the_place_of_others_have_no_contexts(
    family: str, layers: str, change: Callable[[nn.ModuleList], list[nn.Module]]
) -> None:
    model = MODELS[family]()
    given = model.get_submodule(layers)
    given[0], given[1] = change(given)
    with pytest.raises(ValueError, match="layer_idx changes the attention of the model"):
        largest_difference(model)


def test_a_layer_that_runs_another_is_not_known() -> None:
    model = MODELS["ESM-2"]()
    first, second = model.esm.encoder.layer
    assert largest_difference(model) < 1e-4 and model.esm.executor.runs_known_code()
    second.forward = first.forward
    with pytest.raises(ValueError, match="layer 1 did not run in its place"):
        largest_difference(model)
    assert not model.esm.executor.runs_known_code()


class _Reversed(nn.ModuleList):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed([*super().__iter__()])


def test_layers_that_run_in_another_order_write_no_contexts() -> None:
    model = MODELS["ESM-2"]()
    model.esm.encoder.layer = _Reversed(model.esm.encoder.layer)
    with pytest.raises(ValueError, match="layer 0 did not run in its place"):
        largest_difference(model)


@pytest.mark.parametrize("changed", ["config", "base_model.embeddings"])
def test_masks_are_those_that_the_embeddings_count(changed: str) -> None:
    """The library's embeddings read the id of masks from the configuration once, when they are made."""
    model = MODELS["ESM-2"]()
    attrgetter(changed)(model).mask_token_id = 5
    assert largest_difference(model) < 1e-4


@pytest.mark.parametrize(
    ("family", "attention"), [("ESM-2", modeling_esm.EsmSelfAttention), ("ESM-C", modeling_esmc.EsmcAttention)]
)
def test_a_replaced_attention_has_no_contexts(monkeypatch: Patch, family: str, attention: type[nn.Module]) -> None:
    model = MODELS[family]()
    monkeypatch.setattr(attention, "forward", sine_of(attention.forward))
    with pytest.raises(ValueError, match=f"{attention.__name__}.forward was replaced, and contexts are read"):
        largest_difference(model)


def _sharp(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function whose queries are longer."""
    return lambda module, query, *args, **options: function(module, 1.5 * query, *args, **options)


def _register(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sharp", _sharp(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sharp", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("sharp")


def _replace_entry(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _sharp(ALL_ATTENTION_FUNCTIONS["sdpa"]))


def _replace_mask(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    def near(*args: Any, mask_function: Any, **options: Any) -> Any:
        """Tokens see eight others on each side."""
        near = and_masks(mask_function, lambda batch, head, query, key: (query - key).abs() <= 8)
        return sdpa_mask(*args, mask_function=near, **options | {"allow_is_bidirectional_skip": False})

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", near)


def _replace_maker_of_masks(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    def near(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, **options: Any) -> torch.Tensor:
        place = torch.arange(inputs_embeds.shape[1])
        return ((place[:, None] - place).abs() <= 8)[None, None]

    for module in (modeling_esm, modeling_esmc):
        monkeypatch.setattr(module, "create_bidirectional_mask", near)


def _replace_sdpa(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    attend = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, attend.__name__, lambda query, *args, **options: attend(2 * query, *args, **options)
    )


def _replace_eager(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    for module in (modeling_esm, modeling_esmc):
        monkeypatch.setattr(module, "eager_attention_forward", _sharp(module.eager_attention_forward))
    model.set_attn_implementation("eager")


def _set_options(key: str, value: float) -> Callable[[Patch, CachedMaskedLM], None]:
    def change(monkeypatch: Patch, model: CachedMaskedLM) -> None:
        for module in model.modules():
            if key in vars(module):
                setattr(module, key, value)

    return change


def _attend_elsewhere(monkeypatch: Patch, model: CachedMaskedLM) -> None:
    """In one layer, whose configuration is its own."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sharp", _sharp(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    layer = next(module for module in model.base_model.modules() if "is_causal" in vars(module))
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "sharp"


ATTENTION = {
    "registered": _register,
    "entry": _replace_entry,
    "mask": _replace_mask,
    "maker": _replace_maker_of_masks,
    "sdpa": _replace_sdpa,
    "eager": _replace_eager,
    "scaling": _set_options("scaling", 1.5),
    "causal": _set_options("is_causal", True),
    "rotary": _set_options("attention_scaling", 1.5),
    "config": _attend_elsewhere,
}


@pytest.mark.parametrize("change", ATTENTION)
@pytest.mark.parametrize("family", MODELS)
def test_a_changed_attention_has_no_contexts(monkeypatch: Patch, family: str, change: str) -> None:
    model = MODELS[family]()
    ids, _ = random_ids([40], masks=0)
    with torch.no_grad():
        before = model(ids).logits
        assert largest_difference(model) < 1e-4
        ATTENTION[change](monkeypatch, model)
        assert (model(ids).logits - before).abs().max() > 1e-3
        with pytest.raises(ValueError, match=r"changes the attention of the model, and contexts are read"):
            largest_difference(model)
    # What replaces the model's forward would ignore it, too.
    assert not model.base_model.executor.runs_known_code()
    assert model.base_model.executor.plain_addresses() is not None


def test_a_layer_without_rotary_embeddings_has_no_contexts() -> None:
    library = make_esm()
    model = TurboEsmForMaskedLM.from_esm(library, preset="exact")
    ids, mask = random_ids([40, 25], masks=1)
    with torch.no_grad():
        before = model(ids, mask).logits
        for one in (model, library):
            one.esm.encoder.layer[1].attention.self.position_embedding_type = "none"
        expected = library(ids, mask).logits
        assert (expected - before).abs().max() > 1e-3
        assert torch.equal(model(ids, mask).logits, expected)
        with pytest.raises(ValueError, match=r"layer.1.attention.self.position_embedding_type changes the attention"):
            largest_difference(model)


@pytest.mark.parametrize("family", MODELS)
def test_what_no_list_holds_is_seen_by_the_outputs(monkeypatch: Patch, family: str) -> None:
    """A second lock: contexts, and forwards without gradients, are compared with the library's forward."""
    monkeypatch.setattr(forward_code, "_changed_option", lambda *_: "")
    model = MODELS[family]()
    ids, mask = random_ids([40], masks=0)
    with torch.no_grad():
        before = model(ids, mask).logits
        assert largest_difference(model) < 1e-4
        _set_options("is_causal", True)(monkeypatch, model)
        after = model(ids, mask).logits
        assert (after - before).abs().max() > 1e-3
        with pytest.raises(ValueError, match=r"would give other numbers .* because of what was changed in the model"):
            largest_difference(model)
    torch.testing.assert_close(after, model(ids, mask).logits.detach(), rtol=0, atol=1e-4)


_DENSE = {"ESM-2": "encoder.layer.1.output.dense", "ESM-C": "layers.1.mlp.down_proj", "E1": "layers.1.ffn.mlp.w2"}


def _mean_free(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output - output.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("how", ["hook", "module"])
@pytest.mark.parametrize("family", [*MODELS, "E1"])
@torch.no_grad()
def test_what_mixes_tokens_outside_its_attention_has_no_contexts(family: str, how: str) -> None:
    model = MODELS.get(family, make_e1)()
    encoder = model.base_model
    encoder.set_turbo(preset="exact")
    ids = random_ids([20], masks=0)[0] if family in MODELS else random_row([20])
    cache = model(ids, use_cache=True).past_key_values
    expected = model(ids, past_key_values=cache).logits
    name = _DENSE[family]
    if how == "hook":
        encoder.get_submodule(name).register_forward_hook(_mean_free)
        # As the user says, the model is another one: what its contexts hold is nonetheless not what it computes.
        encoder.model_id = "mean-free"
        cause = "_mean_free, as a hook of"
    else:
        mixes = nn.AvgPool2d((3, 1), stride=1, padding=(1, 0))
        encoder.set_submodule(name, nn.Sequential(encoder.get_submodule(name), mixes))
        cause = "what was changed"
    assert (model(ids).logits - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match=rf"than the model itself does for a fixed input, because of \S*{cause}"):
        model(ids, use_cache=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*MODELS, "E1"])
@torch.no_grad()
def test_rounding_does_not_hide_what_mixes_tokens_a_little(family: str, dtype: torch.dtype, device: str) -> None:
    encoder = MODELS.get(family, make_e1)().to(device, dtype).base_model
    encoder.set_turbo(preset="exact")
    ids = (random_ids([20], masks=0)[0] if family in MODELS else random_row([20])).to(device)
    encoder(ids, use_cache=True)
    dense = encoder.get_submodule(_DENSE[family])
    encoder.model_id = "mixed"
    encoder.set_submodule(_DENSE[family], MixesNeighbours(dense, share=0.0))
    encoder(ids, use_cache=True)
    encoder.set_submodule(_DENSE[family], MixesNeighbours(dense, share=0.02))
    with pytest.raises(ValueError, match="than the model itself does for a fixed input"):
        encoder(ids, use_cache=True)


class ScaledByTheLargest(nn.Module):
    """As activations are scaled that are quantised per tensor."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.dense(states)
        return output / output.abs().max()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", [*MODELS, "E1"])
@torch.no_grad()
def test_a_scale_of_all_tokens_has_no_contexts(family: str, seed: int, layer: int) -> None:
    """Only one half of any input has what is largest."""
    encoder = MODELS.get(family, make_e1)().base_model
    encoder.set_turbo(preset="exact")
    ids = random_ids([20], masks=0)[0] if family in MODELS else random_row([20])
    name = _DENSE[family].replace("1", str(layer), 1)
    torch.manual_seed(seed)
    dense = encoder.get_submodule(name)
    nn.init.normal_(dense.weight)
    encoder.model_id = "scaled"
    encoder.set_submodule(name, ScaledByTheLargest(dense))
    with pytest.raises(ValueError, match="than the model itself does for a fixed input"):
        encoder(ids, use_cache=True)


@pytest.mark.parametrize("place", ["encoder", "head"])
def test_what_mixes_rows_of_a_batch_has_no_contexts(place: str) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    module = turbo.model.lm_head if place == "head" else turbo.model.esm.get_submodule(_DENSE["ESM-2"])
    module.register_forward_hook(lambda own, args, output: output - 0.1 * output.mean(dim=0, keepdim=True))
    with pytest.raises(ValueError, match=r"for a fixed input|computes tokens from each other"):
        turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen")


@pytest.mark.parametrize("family", [*MODELS, "E1"])
@torch.no_grad()
def test_a_head_that_mixes_tokens_reads_no_contexts(family: str) -> None:
    model = MODELS.get(family, make_e1)()
    model.base_model.set_turbo(preset="exact")
    ids = random_ids([20], masks=0)[0] if family in MODELS else random_row([10, 10])
    model.lm_head.register_forward_hook(lambda own, args, output: output + output.roll(1, dims=1))
    expected = model(ids[:, :10]).logits
    output = model(ids[:, :10], use_cache=True)
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"computes tokens from each other.* without contexts"):
        model(ids[:, 10:], past_key_values=output.past_key_values)


@torch.no_grad()
def test_layers_of_the_library_that_were_added_have_no_contexts() -> None:
    """They may attend in another way, which weights of zero hide."""
    model = MODELS["ESM-2"]()
    config = copy.deepcopy(model.config)
    config.position_embedding_type = "absolute"
    layer = modeling_esm.EsmLayer(config).eval()
    layer.attention.self.layer_idx = config.num_hidden_layers
    for parameter in layer.parameters():
        parameter.zero_()
    model.esm.encoder.emb_layer_norm_after = nn.Sequential(layer, model.esm.encoder.emb_layer_norm_after)
    with pytest.raises(ValueError, match=r"emb_layer_norm_after.0.attention.self.layer_idx changes the attention"):
        largest_difference(model)


@pytest.mark.parametrize("where", ["half precision", "training"])
@pytest.mark.parametrize("place", ["encoder", "head"])
def test_a_hook_that_knows_its_module_is_compared(place: str, where: str) -> None:
    """A copy of the module is another one to it."""
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    module = turbo.model.lm_head if place == "head" else turbo.model.esm.encoder.layer[1]
    if where == "training":
        module.register_buffer("seen", torch.zeros(()))
        turbo.model.train()
    else:
        turbo.model.bfloat16()
    module.register_forward_hook(lambda own, args, output: output.flip(-2) if own is module else output)
    with pytest.raises(ValueError, match=r"for a fixed input|computes tokens from each other"):
        turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen")


@pytest.mark.parametrize("arm", ["frozen", "full"])
def test_a_hook_that_changes_between_calls_is_compared_again(arm: str) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    dense, strength = turbo.model.get_submodule(f"esm.{_DENSE['ESM-2']}"), 0.0
    dense.register_forward_hook(lambda module, args, output: output - strength * output.mean(dim=1, keepdim=True))

    def score() -> float:
        return turbo.score_variants("MKTAYIAK", ["K2A"], arm=arm).scores[0].score

    before = score()
    strength = 0.5
    if arm == "frozen":
        with pytest.raises(ValueError, match="than the model itself does for a fixed input"):
            score()
    else:
        assert abs(score() - before) > 1e-3
    strength = 0.0
    assert score() == before


class MixesAllTokens(nn.Module):
    """A layer as of PyTorch, which has a buffer, and scales its embeddings if they are large."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self.places = nn.Embedding(100, size, max_norm=1.0)
        self.mixes = nn.TransformerEncoderLayer(size, 4, size, batch_first=True, dropout=0.0)

    def forward(self, states: Tensor) -> Tensor:
        mixed: Tensor = self.mixes(self.scale * (states + self.places(torch.arange(states.shape[-2]))))
        return mixed


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", ["encoder", "head"])
@torch.no_grad()
def test_modules_that_forwards_change_are_compared_as_copies(place: str, training: bool) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    model, mixing = turbo.model, MixesAllTokens(turbo.model.config.hidden_size)
    model.esm.model_id = "mixed"
    if place == "encoder":
        model.esm.encoder.emb_layer_norm_after = nn.Sequential(model.esm.encoder.emb_layer_norm_after, mixing)
    else:
        cache = turbo.prefill("MKTAYIAK")
        model.lm_head = nn.Sequential(mixing, model.lm_head)
    model.train(training)
    before = mixing.places.weight.clone()
    count = mixing.places.weight._version
    with pytest.raises(ValueError, match=r"for a fixed input|computes tokens from each other"):
        if place == "encoder":
            turbo.prefill("MKTAYIAK")
        else:
            turbo.extend(cache, "ACD")
    assert torch.equal(mixing.places.weight, before)
    assert mixing.places.weight._version == count


class MixesNeighbours(nn.Module):
    """Adds a share of what the token before gives."""

    def __init__(self, dense: nn.Module, share: float) -> None:
        super().__init__()
        self.dense, self.share = dense, share

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.dense(states)
        return output + self.share * output.roll(1, dims=1)


@torch.no_grad()
def test_code_that_does_not_run_in_float32_has_no_contexts_in_half_precision() -> None:
    encoder = MODELS["ESM-2"]().bfloat16().base_model
    ids, weight = random_ids([20], masks=0)[0], torch.eye(encoder.config.hidden_size, dtype=torch.bfloat16)
    encoder.encoder.layer[0].output.dense.register_forward_hook(lambda module, args, output: output @ weight)
    encoder.model_id = "hooked"
    encoder(ids)
    with pytest.raises(ValueError, match=r"to be compared in float32, in which it does not run .*: use it in float32"):
        encoder(ids, use_cache=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_are_compared_as_they_were(dtype: torch.dtype) -> None:
    turbo = TurboEsm(MODELS["ESM-2"]().to(dtype), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    expected = turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen").scores[0].score
    for layer in turbo.model.esm.encoder.layer:
        layer.compile(backend="eager")
    found = turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen").scores[0].score
    assert abs(found - expected) < (1e-5 if dtype == torch.float32 else 0.1)


def test_code_that_cannot_be_copied_has_no_contexts_in_half_precision() -> None:
    turbo = TurboEsm(MODELS["ESM-2"]().bfloat16(), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    turbo.model.esm.encoder.layer[0].output.dense.lock = threading.Lock()
    turbo.model.esm.encoder.layer[0].output.dense.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match=r"in which it does not run \(cannot pickle"):
        turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen")


@torch.no_grad()
def test_too_little_memory_to_compare_is_said_to_be_that() -> None:
    encoder = MODELS["ESM-2"]().bfloat16().base_model

    def full(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if output.dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")

    encoder.encoder.layer[0].output.dense.register_forward_hook(full)
    encoder.model_id = "hooked"
    with pytest.raises(torch.OutOfMemoryError):
        encoder(random_ids([20], masks=0)[0], use_cache=True)


@pytest.mark.parametrize("place", ["encoder", "head"])
@torch.no_grad()
def test_weights_with_which_tokens_are_mixed_are_seen(place: str) -> None:
    """As after training a module that did nothing at first."""
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    model, size = turbo.model, turbo.model.config.hidden_size
    mixing = nn.TransformerEncoderLayer(size, 4, size, batch_first=True, norm_first=True, dropout=0.0)
    mixing.self_attn.out_proj.weight.zero_()
    mixing.linear2.weight.zero_()
    mixing.linear2.bias.zero_()
    if place == "encoder":
        model.esm.encoder.emb_layer_norm_after = nn.Sequential(model.esm.encoder.emb_layer_norm_after, mixing)
    else:
        model.lm_head = nn.Sequential(mixing, model.lm_head)
    calls = (
        lambda: turbo.score_variants("MKTAYIAK", ["K2A"], arm="frozen"),
        lambda: turbo.extend(turbo.prefill("MKTAYIAK"), "ACD"),
    )
    for call in calls:
        call()
    mixing.self_attn.out_proj.weight.normal_()
    for call in calls:
        with pytest.raises(ValueError, match=r"for a fixed input|computes tokens from each other"):
            call()


@pytest.mark.parametrize("family", MODELS)
def test_hooks_that_take_each_token_for_itself_have_contexts(family: str) -> None:
    model = MODELS[family]()
    model.get_submodule({"ESM-2": "esm.encoder.layer.1", "ESM-C": "esmc.layers.1"}[family]).register_forward_hook(
        lambda module, args, output: output.sin()
    )
    model.base_model.model_id = "sine"
    assert largest_difference(model) < 1e-4


def test_contacts_of_a_changed_attention_are_refused(monkeypatch: Patch) -> None:
    model = MODELS["ESM-2"]()
    ids, mask = random_ids([40], masks=0)
    _set_options("scaling", 1.5)(monkeypatch, model)
    with pytest.raises(ValueError, match=r"attention.self.scaling changes the attention"):
        model.base_model.predict_contacts(ids, mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_the_librarys_attentions_have_contexts(family: str, attention: str) -> None:
    model = MODELS[family]()
    model.set_attn_implementation(attention)
    assert largest_difference(model) < 1e-4
    assert model.base_model.executor.runs_known_code()


def _replace_gelu(monkeypatch: Patch, models: list[nn.Module]) -> None:
    monkeypatch.setattr(modeling_esm, "gelu", sine_of(modeling_esm.gelu))


def _hook_intermediate(monkeypatch: Patch, models: list[nn.Module]) -> None:
    for model in models:
        model.esm.encoder.layer[0].intermediate.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("change", [None, _replace_gelu, _hook_intermediate])
@pytest.mark.parametrize("gradients", [False, True])
def test_forwards_without_a_cache_have_the_bits_of_the_librarys(
    monkeypatch: Patch, change: Callable[..., None] | None, gradients: bool
) -> None:
    library = make_esm()
    model = TurboEsmForMaskedLM.from_esm(library)
    ids, mask = random_ids([40, 25], masks=1)
    with torch.set_grad_enabled(gradients):
        before = model(ids, mask).logits
        assert torch.equal(before, library(ids, mask).logits)
        if change is not None:
            change(monkeypatch, [library, model])
            after = model(ids, mask).logits
            assert torch.equal(after, library(ids, mask).logits)
            assert not torch.equal(after, before)


@torch.no_grad()
def test_an_activation_of_a_known_library_is_not_replaced() -> None:
    """Not even where it is there before the first call, and has a `dense` as the library's own."""
    library = make_esm()
    model = TurboEsmForMaskedLM.from_esm(library, preset="exact")
    for one in (library, model):
        for layer in one.esm.encoder.layer:
            layer.intermediate = nn.Sequential(OrderedDict(dense=layer.intermediate.dense, act=nn.ReLU()))
    ids, mask = random_ids([40, 25], masks=1)
    assert torch.equal(model(ids, mask).logits, library(ids, mask).logits)
    assert largest_difference(model) < 1e-4


def _exchange_methods(layer: nn.Module, monkeypatch: Patch) -> None:
    layer.feed_forward_chunk = MethodType(BertLayer.feed_forward_chunk, layer)


def _exchange_methods_of_the_class(layer: nn.Module, monkeypatch: Patch) -> None:
    monkeypatch.setattr(modeling_esm.EsmLayer, "feed_forward_chunk", BertLayer.feed_forward_chunk)


def _exchange_a_forward(layer: nn.Module, monkeypatch: Patch) -> None:
    layer.intermediate.intermediate_act_fn = nn.ReLU()
    layer.intermediate.forward = MethodType(BertIntermediate.forward, layer.intermediate)


@pytest.mark.parametrize("change", [_exchange_methods, _exchange_methods_of_the_class, _exchange_a_forward])
@torch.no_grad()
def test_methods_of_a_known_library_are_not_replaced(change: Callable[..., None], monkeypatch: Patch) -> None:
    """Those of another class, which are there before the first call."""
    library = make_esm()
    model = TurboEsmForMaskedLM.from_esm(library, preset="exact")
    ids, mask = random_ids([40, 25], masks=1)
    before = library(ids, mask).logits
    for one in (library, model):
        for layer in one.esm.encoder.layer:
            change(layer, monkeypatch)
    expected = library(ids, mask).logits
    assert (expected - before).abs().max() > 1e-2
    assert torch.equal(model(ids, mask).logits, expected)


def test_hooks_between_the_products_of_a_layer_run() -> None:
    model = MODELS["ESM-2"]()
    for layer in model.base_model.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, args, output: 2 * output)
    assert largest_difference(model) < 1e-4


def _counts_calls(model: nn.Module, name: str, monkeypatch: Patch, how: str) -> list[str]:
    """A list to which calls of a submodule, by a hook or by a class of its own, add its name."""
    module, calls = model.get_submodule(name), list[str]()
    if how == "class":

        class Derived(type(module)):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return super().forward(*args, **kwargs)

        monkeypatch.setattr(module, "__class__", Derived)
    elif how == "hook":
        module.register_forward_hook(lambda *_: calls.append(name))
    else:
        module.register_forward_pre_hook(lambda *_: calls.append(name))
    return calls


@pytest.mark.parametrize("how", ["hook", "pre-hook", "class"])
@pytest.mark.parametrize("family", [*MODELS, "E1"])
@torch.no_grad()
def test_no_call_leaves_out_a_module_that_was_changed(family: str, how: str, monkeypatch: Patch) -> None:
    """What a forward calls, a context and what extends it call, too, or are refused."""
    # Its forwards, too, call what the others might leave out.
    monkeypatch.setattr(Executor, "_agrees", lambda _: True)
    make = MODELS.get(family, make_e1)
    ids = random_ids([20], masks=1)[0] if family in MODELS else random_row([20])
    called, left_out = set[str](), set[str]()
    for name, module in make().named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        model = make()
        model.base_model.set_turbo(preset="exact")
        model.model_id = "changed"
        calls = _counts_calls(model, name, monkeypatch, how)
        model(ids)
        if calls:
            called.add(name)
            calls.clear()
            # Where it is refused, the message says what would be left out.
            try:
                cache = model(ids, use_cache=True).past_key_values
                filled = len(calls)
                model(ids[:, 1:8] if family in MODELS else random_row([9]), past_key_values=cache)
            except ValueError as error:
                assert "would" in str(error) or "changes the attention" in str(error), name
            else:
                left_out |= {name} - {*calls[:filled]} | {name} - {*calls[filled:]}
    assert called and not left_out


def _hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def _replace_forward(model: nn.Module) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _hook_all(model: nn.Module) -> RemovableHandle:
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: output)


def _derive(model: nn.Module) -> None:
    class Derived(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.__class__ = Derived
    # As the others, for the message.
    Derived.__name__ = Derived.__base__.__name__


@pytest.mark.parametrize("change", [_hook, _replace_forward, _hook_all, _derive])
def test_scores_do_not_leave_out_code_of_the_whole_model(change: Callable[[nn.Module], Any]) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    turbo.model.model_id = "changed"
    context = turbo.prefill("MKTAYI")
    handle = change(turbo.model)
    try:
        for call in (
            lambda: turbo.score("MKTAYI", ["ACD"], arm="full"),
            lambda: turbo.score_variants("MKTAYI"),
            lambda: turbo.extend(context, ["ACD"]),
        ):
            with pytest.raises(ValueError, match="TurboEsmForMaskedLM has hooks or a forward of its own"):
                call()
    finally:
        if handle is not None:
            handle.remove()


def test_scores_do_not_leave_out_what_replaces_the_library_s_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    monkeypatch.setattr(EsmForMaskedLM, "forward", lambda self, *args, **kwargs: None)
    with pytest.raises(ValueError, match="has hooks or a forward of its own"):
        turbo.score_variants("MKTAYI")


@pytest.mark.filterwarnings("ignore::esm_turbo.model.heads.UntrainedHeadWarning")
@pytest.mark.parametrize("change", [_hook, _replace_forward, _derive])
def test_contacts_do_not_leave_out_code_of_the_encoder(change: Callable[[nn.Module], Any]) -> None:
    turbo = TurboEsm(MODELS["ESM-2"](), EsmTokenizer.from_pretrained(EMBEDDED_MODEL))
    assert turbo.embed(["MKTAYI"], include=["contacts"])[0].contacts is not None
    change(turbo.model.base_model)
    with pytest.raises(ValueError, match="has hooks or a forward of its own"):
        turbo.embed(["MKTAYI"], include=["contacts"])


@pytest.mark.parametrize("family", ["ESM-2", "ESM-C"])
def test_what_makes_masks_calls_is_code_of_the_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MODELS[family]().base_model
    before = model_identity(encoder)
    monkeypatch.setattr(masking_utils, "bidirectional_mask_function", lambda *places: places[-1] > 2)
    found = model_identity(encoder)
    assert "bidirectional_mask_function" in found.foreign and before.difference(found)


@pytest.mark.filterwarnings("ignore::esm_turbo.proteins.limits.UntrainedInputWarning")
def test_a_warning_does_not_make_another_model(tmp_path: Path) -> None:
    """ESM-C warns of peptides, once."""
    turbo = TurboEsm.from_pretrained(ESMC_MINI, device="cpu", preset="turbo3")
    context = turbo.prefill("MKTAYI")
    store = ContextStore(tmp_path)
    store.get_or_prefill(turbo, "MKTAYI")
    found = [turbo.score(context, ["ACD"]).scores for _ in range(2)]
    assert found[0] == found[1]
    turbo.score("MKTAYI", ["ACD"], store=store)
    assert store.get(turbo, "MKTAYI")[0] is not None
