"""Models whose layers lie on several devices: the results of one device, with what is cached beside the layers."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model

from esm_turbo import ContextStore, KVCalibrator, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.files.extras import install_hint
from esm_turbo.files.families import FAMILIES
from esm_turbo.files.fingerprint import model_fingerprint
from esm_turbo.model import spread
from esm_turbo.parallel.workers import Workers
from tests.helpers.models import E1_MINI, ESMC_MINI, make_config, make_esm, random_ids
from tests.helpers.numbered_cpus import NumberedCpus, number_of
from tests.helpers.packed import run_packed

FOLDERS = {"esm": EMBEDDED_MODEL, "esmc": ESMC_MINI}
# Older versions of transformers lack a family.
INSTALLED = [name for name in FOLDERS if hasattr(transformers, FAMILIES[name].tokenizer)]
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "MSILV"]
PEPTIDES = ["ACDKL", "GHIK"]
# One CPU computes both, in the same order.
EXACTLY = {"rtol": 0, "atol": 0}

pytestmark = [
    pytest.mark.usefixtures("modes_only_watch"),
    pytest.mark.filterwarnings("ignore::esm_turbo.proteins.limits.UntrainedInputWarning"),
]


@pytest.fixture(scope="module", params=INSTALLED)
def one(request: pytest.FixtureRequest) -> TurboEsm:
    """A small model of each family on one device."""
    return TurboEsm.from_pretrained(FOLDERS[request.param], device="cpu")


@pytest.fixture
def cpus() -> Iterator[None]:
    with NumberedCpus(), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def spread_once(one: TurboEsm) -> TurboEsm:
    """The same model with the second half of its layers on another device."""
    with NumberedCpus():
        made = copy.deepcopy(one)
        layers = _layers(made)
        for layer in layers[len(layers) // 2 :]:
            layer.to("cpu:1")
        spread.finalize_dispatch(made.model)
    return made


@pytest.fixture
def spread_out(spread_once: TurboEsm, cpus: None) -> TurboEsm:
    """That model, while devices are told apart. Do not change it."""
    made = spread_once
    assert made.model.base_model.is_spread and made.model.device.index == 0
    return made


def _layers(turbo: TurboEsm) -> Any:
    return turbo.model.base_model.get_submodule(turbo.model.family.layers)


def _numbers(cache: TurboKVCache) -> list[set[int]]:
    """Of each layer, the devices of its tensors."""
    kinds = ("packed", "protected", "rows")
    return [{number_of(x) for kind in kinds for x in getattr(layer, kind).values()} for layer in cache.layers]


def test_caches_lie_beside_their_layers(one: TurboEsm, spread_out: TurboEsm, tmp_path: Path) -> None:
    half = len(_layers(one)) // 2
    beside = [{0}] * half + [{1}] * half
    expected, cache = one.prefill(SEQUENCES), spread_out.prefill(SEQUENCES)
    assert _numbers(cache) == beside
    assert {number_of(x) for x in (cache.lengths, cache.token_ids, cache.protected_columns)} == {0}
    for (name, tensor), (_, found) in zip(expected.named_tensors(), cache.named_tensors(), strict=True):
        torch.testing.assert_close(found.cpu(), tensor, **EXACTLY, msg=name)
    index = [1, 0, 1]
    new = [*PEPTIDES, "AC"]
    results = [turbo.extend(own, new, context_index=index) for turbo, own in ((one, expected), (spread_out, cache))]
    torch.testing.assert_close(results[1].logits, results[0].logits, **EXACTLY)
    # Appended, selected, joined, cut and read tokens stay where they are.
    for turbo, own in ((one, expected), (spread_out, cache)):
        turbo.extend(own, PEPTIDES, append=True)
    rows = cache.cut(cache.lengths.tolist())
    joined = TurboKVCache.cat([rows[1], cache.select([0])])
    assert _numbers(cache) == _numbers(rows[0]) == _numbers(joined) == beside
    assert _numbers(spread_out.model.base_model.decoded(cache)) == beside
    # From a file, they are put there.
    cache.save(tmp_path / "cache.safetensors")
    for loaded in (
        TurboKVCache.load(tmp_path / "cache.safetensors", model=spread_out.model),
        TurboKVCache.load(tmp_path / "cache.safetensors"),
    ):
        found = spread_out.extend(loaded, PEPTIDES)
        torch.testing.assert_close(found.logits, one.extend(expected, PEPTIDES).logits, **EXACTLY)
        assert _numbers(loaded) == beside
    loaded.place(torch.device("cpu", 0), [torch.device("cpu", 0)] * 2 * half)
    assert _numbers(loaded) == [{0}] * 2 * half


def test_tasks_give_what_they_give_on_one_device(one: TurboEsm, spread_out: TurboEsm, tmp_path: Path) -> None:
    target, other = SEQUENCES
    for arm in ("frozen", "full", "turbo"):
        pair = [turbo.score(target, PEPTIDES, arm=arm).scores for turbo in (one, spread_out)]
        assert pair[0] == pair[1]
    pairs = [turbo.score_pairs(SEQUENCES, PEPTIDES).scores for turbo in (one, spread_out)]
    assert pairs[0] == pairs[1]
    variants = [turbo.score_variants(other).to_dict() for turbo in (one, spread_out)]
    assert variants[0] == variants[1]
    written = [turbo.generate(other, max_new_tokens=3, seed=1).sequences for turbo in (one, spread_out)]
    assert written[0] == written[1]
    embeddings = [turbo.embed(SEQUENCES, repr_layers=(0, 1, -1)) for turbo in (one, spread_out)]
    for expected, found in zip(*embeddings, strict=True):
        for layer, states in expected.representations.items():
            torch.testing.assert_close(found.representations[layer], states, **EXACTLY)


def test_a_store_serves_both(one: TurboEsm, spread_out: TurboEsm, tmp_path: Path) -> None:
    with ContextStore(tmp_path) as store:
        assert store.add(spread_out, SEQUENCES) == 2
        assert store.add(one, SEQUENCES) == 0
        cache = store.get_or_prefill(spread_out, SEQUENCES)
        logits = [
            turbo.extend(own, PEPTIDES).logits for turbo, own in ((one, one.prefill(SEQUENCES)), (spread_out, cache))
        ]
        torch.testing.assert_close(logits[1], logits[0], **EXACTLY)
        assert _numbers(cache)[-1] == {1}
        with (
            pytest.raises(ValueError, match="lies on several devices, but contexts of a pool on one"),
            store.hold(spread_out, SEQUENCES) as held,
        ):
            spread_out.model.base_model(torch.tensor([[5]]), past_key_values=held, context_index=[0])


def test_copies_in_other_processes_are_refused(spread_out: TurboEsm) -> None:
    with pytest.raises(ValueError, match="the model lies on several devices: its copies would, too; load it on one"):
        Workers.of(spread_out, ["cpu"])


def test_packed_rows_follow_the_layers(one: TurboEsm, spread_out: TurboEsm) -> None:
    lengths, found = [9, 4], []
    ids, mask = random_ids(lengths)
    for turbo in (one, spread_out):
        encoder = turbo.model.base_model
        assert encoder.executor.plain_addresses() is not None and encoder.executor.addresses() is None
        packing, last, states = run_packed(encoder, ids, mask, layers=range(len(_layers(turbo))))
        assert number_of(last) == 0
        found.append([packing.unpack(x).cpu() for x in (*states.values(), last)])
    torch.testing.assert_close(found[1], found[0], **EXACTLY)


def test_copies_stay_spread_and_can_be_moved(one: TurboEsm, spread_out: TurboEsm) -> None:
    expected = one.prefill(SEQUENCES[1])
    copied: TurboEsm = pickle.loads(pickle.dumps(spread_out))
    for last in (1, 0):
        found = copied.prefill(SEQUENCES[1])
        assert _numbers(found)[-1] == {last}
        for (name, tensor), (_, own) in zip(expected.named_tensors(), found.named_tensors(), strict=True):
            torch.testing.assert_close(own.cpu(), tensor, **EXACTLY, msg=name)
        copied.model.to("cpu:0")


def test_models_are_calibrated_where_they_lie(one: TurboEsm, spread_out: TurboEsm) -> None:
    ids, mask = random_ids([200, 90], eos=True)
    made = []
    for turbo in (one, spread_out):
        calibrator = KVCalibrator(turbo.model)
        calibrator.partial_fit(ids, mask)
        made.append(calibrator.finalize(["turbo3"]))
    states = [dict(calibration.codec("turbo3").state) for calibration in made]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, **EXACTLY, msg=name)


def test_a_spread_model_of_the_library_is_converted(cpus: None) -> None:
    model = make_esm(layers=2)
    ids, mask = random_ids([9, 4])
    expected = model(ids, mask).logits
    parts = {"esm.embeddings": "cpu:0", "esm.rotary_embeddings": "cpu:0", "esm.encoder.layer.0": "cpu:0"}
    rest = ("esm.encoder.layer.1", "esm.encoder.emb_layer_norm_after", "esm.contact_head", "lm_head.dense")
    parts |= dict.fromkeys((*rest, "lm_head.layer_norm"), "cpu:1")
    for name, device in parts.items():
        model.get_submodule(name).to(device)
    converted = TurboEsmForMaskedLM.from_esm(model, preset="exact")
    assert [device.index for device in spread.layer_devices(converted.esm)] == [0, 1]
    found = converted(ids, mask, use_cache=True, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected, **EXACTLY)
    assert {number_of(x) for x in (found.logits, *found.hidden_states)} == {0}
    # The library's model is left as it was.
    assert number_of(model.lm_head.dense.weight) == 1 and number_of(converted.lm_head.dense.weight) == 0


def test_offloaded_weights_are_refused() -> None:
    model = make_esm()
    converted = TurboEsmForMaskedLM.from_esm(model)
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"weights of the model, such as esm\.\S+, are offloaded to the CPU or a disk"):
        TurboEsmForMaskedLM.from_esm(model)
    cpu_offload(converted, torch.device("cpu"))
    with pytest.raises(ValueError, match="offloaded to the CPU or a disk"):
        model_fingerprint(converted.esm)


def test_the_hooks_of_accelerate_compute_the_same() -> None:
    model = TurboEsmForMaskedLM.from_esm(make_esm(), preset="exact")
    ids, mask = random_ids([9, 4])
    with torch.no_grad():
        expected = model(ids, mask, use_cache=True)
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        found = model(ids, mask, use_cache=True)
        assert model.esm.executor.plain_addresses() is None
        # Where a model was loaded, they are not left behind.
        spread.finalize_dispatch(model)
        assert model.esm.executor.plain_addresses() is not None and not {"to", "forward"} & model.__dict__.keys()
        again = model(ids, mask, use_cache=True)
    torch.testing.assert_close(found.logits, expected.logits, **EXACTLY)
    torch.testing.assert_close(again.logits, expected.logits, **EXACTLY)


def _plan(device_map: Any, max_memory: Any = None) -> dict[str, str]:
    with torch.device("meta"):
        model = TurboEsmForMaskedLM(make_config(layers=4))
    return {name: str(device) for name, device in spread.plan(model, device_map, max_memory, torch.float32).items()}


def test_layers_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(value: Any, name: str) -> torch.device | None:
        return None if value == "disk" else torch.device(f"cuda:{value}" if isinstance(value, int) else value)

    monkeypatch.setattr(spread, "_device", device)
    layer = 4 * sum(x.numel() for x in make_esm(layers=1).esm.encoder.layer.parameters())
    assert _plan("balanced_low_0", {0: 8 * layer, 1: 8 * layer, "cpu": 0})["esm.encoder.layer.3"] == "cuda:1"
    for strategy in ("auto", "balanced", "sequential"):
        # Room for the largest layer is kept on the first device.
        first = 4 if strategy == "sequential" else 8
        found = _plan(strategy, {0: first * layer, 1: 8 * layer, "cpu": 0})
        layers = [found.pop(f"esm.encoder.layer.{index}") for index in range(4)]
        assert layers == sorted(layers) and set(layers) == {"cuda:0", "cuda:1"}
        assert set(found.values()) == {"cuda:0"}
    assert {"esm.embeddings", "esm.encoder.emb_layer_norm_after", "esm.rotary_embeddings", "lm_head"} <= found.keys()
    message = (
        r"leaves \d parts of the model, such as 'esm\S+', on the CPU or a disk, from where every use would copy them:"
    )
    with pytest.raises(
        ValueError, match=message + " use more devices or raise `max_memory`, or run all of it on the CPU"
    ):
        _plan("auto", {0: 3 * layer, "cpu": "1GB"})
    given = {"esm.embeddings": 1, "esm.encoder": 0, "esm.encoder.layer.3": 1, "esm.contact_head": 0, "lm_head": 0}
    for place in ("cpu", "disk"):
        with pytest.raises(ValueError, match=message + " run all of it on the CPU"):
            _plan({**given, "esm.encoder.layer.2": place})
    found = _plan(given)
    assert [found.pop(f"esm.encoder.layer.{index}")[-1] for index in range(4)] == ["0", "0", "0", "1"]
    # What is not a layer lies with the embeddings.
    assert set(found.values()) == {"cuda:1"}


def test_maps_are_checked() -> None:
    whole = {"esm": "cpu", "lm_head": "cpu"}
    assert set(_plan(whole).values()) == {"cpu"}
    with pytest.raises(
        ValueError, match=r"names 'esm\.layer\.0', which .*its layers are 'esm\.encoder\.layer\.0' to 'esm\.e"
    ):
        _plan({**whole, "esm.layer.0": "cpu"})
    with pytest.raises(ValueError, match=r"gives no device for \d+ weights of the model, such as 'esm\.embeddings"):
        _plan({"esm.encoder": "cpu", "lm_head": "cpu"})
    for device in ("cuda:99", "fast", 99, None):
        with pytest.raises(ValueError, match=f"`device_map` puts 'lm_head' on {device!r}, which cannot be used here: "):
            _plan({**whole, "lm_head": device})
    with pytest.raises(ValueError, match="`max_memory` is for a strategy"):
        _plan(whole, {0: "1GB"})


def test_accelerate_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"device_map needs accelerate: {re.escape(install_hint('large'))}"):
        _plan("auto")
    with pytest.raises(ImportError, match=rf"{re.escape(install_hint('large'))}"):
        TurboEsm.from_pretrained(device_map={"esm": "cpu", "lm_head": "cpu"})


@pytest.mark.gpu
@pytest.mark.parametrize("one", ["esm"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_devices_share_a_model(one: TurboEsm, dtype: torch.dtype, tmp_path: Path) -> None:
    devices = [torch.device("cuda", index % torch.cuda.device_count()) for index in range(2)]
    half = len(_layers(one)) // 2
    parts = {f"esm.encoder.layer.{index}": devices[index >= half] for index in range(2 * half)}
    parts |= dict.fromkeys(
        ("esm.embeddings", "esm.encoder.emb_layer_norm_after", "esm.contact_head", "lm_head"), devices[1]
    )
    made = TurboEsm.from_pretrained(EMBEDDED_MODEL, device_map=parts, dtype=dtype)
    plain = TurboEsm.from_pretrained(EMBEDDED_MODEL, device=devices[0], dtype=dtype)
    # With one device, neither is spread.
    plain.model.base_model.captures = made.model.base_model.captures = False
    assert made.model.base_model.is_spread == (devices[0] != devices[1]) and made.model.device == devices[1]
    caches = [turbo.prefill(SEQUENCES) for turbo in (plain, made)]
    for index, layer in enumerate(caches[1].layers):
        assert {x.device for x in layer.packed.values()} == {devices[index >= half]}
    for (name, expected), (_, found) in zip(*(cache.named_tensors() for cache in caches), strict=True):
        torch.testing.assert_close(found.cpu(), expected.cpu(), **EXACTLY, msg=name)
    logits = [turbo.extend(own, PEPTIDES).logits.cpu() for turbo, own in zip((plain, made), caches, strict=True)]
    torch.testing.assert_close(logits[1], logits[0], **EXACTLY)
    scores = [turbo.score(SEQUENCES[0], PEPTIDES).scores for turbo in (plain, made)]
    assert scores[0] == scores[1]
    variants = [turbo.score_variants(SEQUENCES[1]).to_dict() for turbo in (plain, made)]
    assert variants[0] == variants[1]
    with ContextStore(tmp_path) as store:
        store.add(made, SEQUENCES)
        cache = store.get_or_prefill(made, SEQUENCES)
        torch.testing.assert_close(made.extend(cache, PEPTIDES).logits.cpu(), logits[0], **EXACTLY)


@pytest.mark.usefixtures("cpus")
def test_contexts_of_e1_lie_beside_the_layers_that_store_them() -> None:
    """One in three does."""
    e1 = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="exact")
    two = copy.deepcopy(e1)
    layers = _layers(two)
    for layer in layers[len(layers) // 2 :]:
        layer.to("cpu:1")
    spread.finalize_dispatch(two.model)
    homologs, queries = ["MKTAYIAKQRQISFVKSH,MKSAYLAKQRH", "MKXXTAYX,XGSW"], ["MKTAYI?KQ", "MKTA"]
    cache = two.prefill(homologs)
    devices = [number_of(layer.packed["keys"]) for layer in cache.layers]
    assert devices == [int(index >= len(layers) // 2) for index in range(2, len(layers), 3)]
    found, expected = two.extend(cache, queries), e1.extend(e1.prefill(homologs), queries)
    mask = expected.attention_mask.bool()
    torch.testing.assert_close(found.logits.cpu()[mask], expected.logits[mask], **EXACTLY)
    for context in (None, homologs[0]):
        scores, right = (one.score_variants("MKTAYIAK", ["K2A"], context=context).values for one in (two, e1))
        assert scores == right
