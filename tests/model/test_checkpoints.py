"""Saving and loading: published checkpoints, Hugging Face's own, and damaged or foreign ones."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from safetensors.torch import load_file, save_file
from torch.nn.utils.parametrize import register_parametrization
from transformers import BertConfig, EsmConfig, EsmForMaskedLM, EsmModel

from esm_turbo import TurboConfig, TurboEsmForMaskedLM, TurboEsmModel
from esm_turbo.config import DEFAULT_PRESET, PRESETS
from esm_turbo.model.checkpoints import checkpoint_class
from esm_turbo.model.heads import untrained
from tests.helpers.e1 import make_e1
from tests.helpers.models import make_config, make_esm, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]
PUBLISHED = Path(__file__).parents[1] / "data" / "published_configs"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INV_FREQ = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"


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


class Doubling(ModelHook):
    """Of accelerate's kind, but by a user."""

    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


def _forward_over_accelerate(dense: torch.nn.Module, factor: float = 0.5) -> None:
    add_hook_to_module(dense, AlignDevicesHook(io_same_device=True))
    moved = dense.forward
    dense.forward = lambda x: factor * moved(x)


_OTHER_OUTPUTS = "computes something else than its weights do in its class"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.esm.encoder.layer[1].register_forward_hook(lambda *_: None), "layer.1 has hooks"),
        (lambda model: model.register_forward_pre_hook(lambda *_: None), "EsmForMaskedLM has hooks"),
        (
            lambda model: setattr(model.lm_head, "forward", model.lm_head.dense.forward),
            "lm_head has a forward of its own",
        ),
        (lambda model: setattr(model.esm.encoder.layer[0].LayerNorm, "eps", 0.5), "LayerNorm has another eps"),
        (lambda model: setattr(model.esm.embeddings, "token_dropout", False), "has another token_dropout"),
        (lambda model: setattr(model.lm_head, "dense", torch.nn.Identity()), "lm_head.dense is a Identity"),
        (lambda model: register_parametrization(model.lm_head.dense, "weight", torch.nn.Tanh()), "is a Parametrized"),
        (lambda model: add_hook_to_module(model.esm.encoder.layer[0], Doubling()), "layer.0 has hooks"),
        (lambda model: model.esm.encoder.layer.append(model.esm.encoder.layer[0]), "layer has 3 modules, not 2"),
        (lambda model: model.esm.encoder.layer.pop(1), "layer has 1 modules, not 2"),
        (lambda model: delattr(model.lm_head, "dense"), "does not fit its configuration: .* has no attribute"),
        (
            lambda model: setattr(model.train().esm.encoder.layer[0], "feed_forward_chunk", lambda x: x),
            "layer.0 has a feed_forward_chunk of its own",
        ),
        # What no list of what is left out names.
        (lambda model: _forward_over_accelerate(model.esm.encoder.layer[0].intermediate.dense), _OTHER_OUTPUTS),
    ],
)
def test_a_model_that_computes_something_of_its_own_is_not_converted(
    change: Callable[[EsmForMaskedLM], object], message: str
) -> None:
    model = make_esm()
    change(model)
    with pytest.raises(ValueError, match=message):
        TurboEsmForMaskedLM.from_esm(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_does_not_hide_what_a_converted_model_computes_of_its_own(dtype: torch.dtype, device: str) -> None:
    model = make_esm().to(device, dtype)
    TurboEsmForMaskedLM.from_esm(model)
    _forward_over_accelerate(model.esm.encoder.layer[0].intermediate.dense, 0.95)
    with pytest.raises(ValueError, match=_OTHER_OUTPUTS):
        TurboEsmForMaskedLM.from_esm(model)


def test_threads_may_load_models(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    dtypes = [torch.float32, torch.bfloat16] * 6
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda dtype: TurboEsmForMaskedLM.from_pretrained(tmp_path, dtype=dtype), dtypes))
    assert [{x.dtype for x in one.parameters()} for one in made] == [{dtype} for dtype in dtypes]
    assert torch.get_default_dtype() == torch.float32


class OwnClass(EsmForMaskedLM):
    """A class of a user's, which computes what the library's does."""

    def count(self) -> int:
        return 1


def _with_dropout(model: EsmForMaskedLM) -> EsmForMaskedLM:
    model.esm.embeddings.dropout.p = 0.3
    return model


def _hooked(model: EsmForMaskedLM) -> EsmForMaskedLM:
    add_hook_to_module(model.esm.encoder.layer[0], AlignDevicesHook(io_same_device=True))
    add_hook_to_module(model.esm.encoder.layer[1], AlignDevicesHook())
    remove_hook_from_submodules(model.esm.encoder.layer[1])
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda model: OwnClass(model.config).eval(),
        _with_dropout,
        _hooked,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: TurboEsmForMaskedLM.from_esm(model),
    ],
)
def test_models_that_compute_what_their_class_does_are_converted(
    make: Callable[[EsmForMaskedLM], EsmForMaskedLM],
) -> None:
    model = make(make_esm())
    ids, mask = random_ids([14, 9])
    with torch.no_grad():
        assert torch.equal(TurboEsmForMaskedLM.from_esm(model)(ids, mask).logits, model(ids, mask).logits)


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


def test_weights_of_another_shape_are_missing(tmp_path: Path) -> None:
    """Those that transformers draws at random where it is told to ignore their sizes."""
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 weights of the encoder, such as .*word_embeddings\.weight"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact", vocab_size=40, ignore_mismatched_sizes=True)
    state = {name: x.clone() for name, x in load_file(tmp_path / "model.safetensors").items()}
    state["lm_head.dense.weight"] = state["lm_head.dense.weight"][:-1].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact", ignore_mismatched_sizes=True)
    assert "was never trained" in (untrained(model, "lm_head") or "")


def test_a_weight_that_is_missing(tmp_path: Path) -> None:
    """A missing weight of the encoder is an error, one of a head is reported by transformers."""
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path)
    # Of their own, as they are written over the file that they lie in.
    state = {name: x.clone() for name, x in load_file(tmp_path / "model.safetensors").items()}
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
    # The end of a file that was not written whole.
    state["esm.encoder.layer.3.output.dense.weight"] = torch.zeros(320, 1280)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"3\.output\.dense\.weight is all zeros"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")


def test_no_layer_of_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    make_e1(layers=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="has num_hidden_layers 3, but the checkpoint has layer 4, too"):
        checkpoint_class(tmp_path, {}).from_pretrained(tmp_path, preset="exact")


def test_a_checkpoint_without_frequencies(tmp_path: Path) -> None:
    """They follow from the configuration, and some programs do not save them."""
    published_checkpoint("esm2_t6_8M_UR50D", tmp_path)
    state = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if "inv_freq" not in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = TurboEsmForMaskedLM.from_pretrained(tmp_path, preset="exact")
    expected = 10000 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.esm.rotary_embeddings.inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_checkpoints_saved_by_hugging_face(tmp_path: Path, dtype: torch.dtype) -> None:
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
def test_other_architectures_are_refused(tmp_path: Path, config: dict[str, object], message: str) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(token_dropuot=c.pop("token_dropout")), "lacks token_dropout, on which results depend"),
        (lambda c: c.update(token_dropout="false"), "has token_dropout 'false', on which results depend"),
        (lambda c: c.pop("layer_norm_eps"), "lacks layer_norm_eps"),
        (lambda c: c.update(emb_layer_norm_before=None), "has emb_layer_norm_before None"),
        (lambda c: c.update(mask_token_id="32"), "has mask_token_id '32'"),
        (lambda c: c.update(num_hidden_layers=True), "has num_hidden_layers True"),
        (
            lambda c: c.update(num_hidden_layers=10**6),
            "has num_hidden_layers 1000000, but the checkpoint only",
        ),
        (lambda c: c.pop("position_embedding_type"), "an ESM model with absolute positions"),
        (lambda c: c.update(is_decoder=None), "needs an ESM-2 encoder: rotary positions, no decoder"),
        (lambda c: c.update(intermediate_size=10**8), "`intermediate_size` must be at most 131,072, got 100,000,000"),
        (lambda c: c.update(vocab_size=446), "`vocab_size` must be at most 256, got 446"),
        (lambda c: c.update(is_causal=True), "`is_causal` must not be set"),
        (lambda c: c.update(max_position_embeddings=2**31), "must be at most 1,048,576, got 2,147,483,648"),
        (
            lambda c: c.update(add_cross_attention=[]),
            r"config.json is not valid \(Field 'add_cross_attention' with value",
        ),
        (lambda c: c.update(bos_token_id="x"), r"config.json is not valid \(Field 'bos_token_id' with value 'x'"),
        (lambda c: c.update(id2label=""), r"config.json is not valid \(.*(id2label|'items')"),
    ],
)
def test_fields_that_decide_results_are_required(
    tiny_model: MakeModel, tmp_path: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    """transformers would take its default, or raise errors of its own."""
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        TurboEsmForMaskedLM.from_pretrained(tmp_path)


def test_a_changed_dtype_in_a_header_is_noticed(tiny_model: MakeModel, tmp_path: Path) -> None:
    """The same bytes are other numbers in it, all of them finite."""
    tiny_model().half().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["lm_head.dense.bias"]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"has weights in BF16 and F16, its header is damaged"):
        TurboEsmForMaskedLM.from_pretrained(tmp_path)
