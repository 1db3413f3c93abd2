"""ESM-C's models: exact beside Hugging Face's, converted from them, and with a cache."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import EsmcForMaskedLM, EsmcModel

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboEsmModel, TurboKVCache
from esm_turbo.config import DEFAULT_PRESET, PRODUCT_PRESETS
from esm_turbo.model.projections import stacked_weight
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM, TurboEsmcModel
from tests.helpers.models import (
    EOS,
    ESMC_MINI,
    MASK,
    assert_same_output,
    cast,
    make_calibration,
    make_esm,
    make_esmc,
    random_ids,
    relative_error,
)
from tests.helpers.packed import Recorder, run_packed

# Heads of the three published models, all of 64 components.
GEOMETRIES = {"300M": 15, "600M": 18, "6B": 40}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TURBO = ("turbo4", "turbo3", "turbo2", "turbo1")


@torch.no_grad()
@pytest.mark.parametrize("size", GEOMETRIES)
def test_prefill_is_exact_in_every_published_geometry(size: str) -> None:
    """Hidden states, logits and attentions, with and without a cache; padding and masks in the batch."""
    hf = make_esmc(heads=GEOMETRIES[size], head_dim=64, layers=1 if size == "6B" else 2)
    ids, mask = random_ids([14, 9, 4], masks=2, eos=True)
    for dtype in DTYPES:
        hf = cast(hf, dtype)
        for attention in ("eager", "sdpa"):
            hf.set_attn_implementation(attention)
            ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
            options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
            expected = hf(ids, mask, **options)
            assert expected.logits.dtype == dtype and expected.logits.shape[-1] == 64
            assert_same_output(ours(ids, mask, **options), expected)
            cached = ours(ids, mask, use_cache=True, **options)
            assert_same_output(cached, expected)
            assert cached.past_key_values.lengths.tolist() == [14, 9, 4]


@torch.no_grad()
def test_base_model_is_exact() -> None:
    hf = make_esmc().esmc
    ours = TurboEsmcModel.from_esm(hf, preset="exact")
    ids, mask = random_ids([14, 9], masks=1, eos=True)
    expected = hf(ids, mask, output_hidden_states=True)
    for options in ({}, {"use_cache": True}, {"row_lengths": [14, 9]}):
        assert_same_output(ours(ids, mask, output_hidden_states=True, **options), expected)
    assert isinstance(ours(ids, mask, return_dict=False, use_cache=True), tuple)
    positions = torch.arange(14)[None] + torch.tensor([[3], [500]])
    assert_same_output(ours(ids, mask, positions, use_cache=True), hf(ids, mask, positions))


@torch.no_grad()
def test_labels_and_gradients_are_hugging_faces() -> None:
    hf = make_esmc()
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    ids, mask = random_ids([14, 9], masks=2, eos=True)
    labels = torch.where(ids == MASK, 7, -100)
    assert_same_output(ours(ids, mask, labels=labels, use_cache=True), hf(ids, mask, labels=labels))
    with torch.enable_grad():
        found = [torch.autograd.grad(model(ids, mask).logits.sum(), [*model.parameters()]) for model in (ours, hf)]
        with pytest.raises(ValueError, match="while gradients are recorded"):
            ours(ids, mask, use_cache=True)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@torch.no_grad()
def test_a_token_in_its_own_place_is_the_exact_run() -> None:
    """Leave-one-out at every position, on the frozen context: no token dropout that would depend on the rest."""
    hf = make_esmc(layers=3)
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    ids, _ = random_ids([14], masks=3, eos=True)
    cache = ours(ids, use_cache=True).past_key_values
    seen = torch.ones(14, 15, dtype=torch.int64)
    seen[torch.arange(14), torch.arange(14)] = 0
    one = ours(ids[0][:, None], seen, torch.arange(14)[:, None], past_key_values=cache)
    expected = hf(ids).logits[0]
    # As for ESM-2: rounding, relative to logits of about 3.
    assert (one.logits[:, 0] - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_all_masked_is_an_input_as_any_other() -> None:
    """ESM-2 has no scale for it."""
    hf = make_esmc()
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    ids = torch.full((1, 5), MASK)
    assert_same_output(ours(ids, use_cache=True), hf(ids))


@torch.no_grad()
@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_presets_write_read_and_append(preset: str) -> None:
    hf = make_esmc(heads=3, head_dim=64)
    ours = TurboEsmcForMaskedLM.from_esm(hf, calibration=make_calibration(hf), preset=preset)
    ids, mask = random_ids([20, 17], eos=False)
    cache = ours(ids, mask, use_cache=True).past_key_values
    new = torch.tensor([[5, 6, EOS], [8, 9, EOS]])
    appended = ours(new, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [23, 20]
    for row, length in enumerate((20, 17)):
        exact = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
        past = exact(ids[row : row + 1, :length], use_cache=True).past_key_values
        expected = exact(new[row : row + 1], past_key_values=past).logits
        assert relative_error(appended.logits[row : row + 1], expected) < (1e-5 if preset == "exact" else 0.9)


def test_from_esm_shares_the_weights_and_refuses_others() -> None:
    hf = make_esmc()
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    assert [p.data_ptr() for p in ours.parameters()] == [p.data_ptr() for p in hf.parameters()]
    assert type(hf.esmc) is EsmcModel
    for cls, model in ((TurboEsmcModel, make_esm().esm), (TurboEsmcForMaskedLM, make_esm())):
        with pytest.raises(ValueError, match=r"needs a model of ESM-C, got model type 'esm'"):
            cls.from_esm(model)
    for cls, model in ((TurboEsmModel, hf.esmc), (TurboEsmForMaskedLM, hf)):
        with pytest.raises(ValueError, match=r"needs a model of ESM-2, got model type 'esmc'"):
            cls.from_esm(model)


def test_no_layer_of_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    make_esmc(layers=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="has num_hidden_layers 3, but the checkpoint has layer 4, too"):
        TurboEsmcForMaskedLM.from_pretrained(tmp_path, preset="exact")


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_save_pretrained_is_read_by_both(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact").to(dtype)
    assert {x.dtype for x in ours.esmc.rotary_emb.buffers()} == {torch.float32}
    ours.save_pretrained(tmp_path)
    ids, mask = random_ids([14, 9], masks=1)
    expected = ours(ids, mask).logits
    for cls in (TurboEsmcForMaskedLM, EsmcForMaskedLM):
        assert torch.equal(cls.from_pretrained(tmp_path, dtype=dtype).eval()(ids, mask).logits, expected)
    encoder = TurboEsmcModel.from_pretrained(tmp_path, dtype=dtype).eval()
    assert torch.equal(encoder(ids, mask).last_hidden_state, ours.esmc(ids, mask).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_holds_no_stacked_weights(copied: Callable[[TurboEsmcModel], TurboEsmcModel]) -> None:
    """Which it would keep beside its own weights."""
    ours = TurboEsmcModel.from_esm(make_esmc().esmc, preset="exact")
    attention = ours.layers[0].self_attn
    stacked = stacked_weight(attention, (attention.q_proj, attention.k_proj, attention.v_proj))
    other = copied(ours).layers[0].self_attn
    assert set(vars(other)) == set(vars(attention)) and not any(isinstance(x, Tensor) for x in vars(other).values())
    # Each has its own.
    again = stacked_weight(other, (other.q_proj, other.k_proj, other.v_proj))
    assert torch.equal(again, stacked) and again.data_ptr() != stacked.data_ptr()
    assert stacked_weight(attention, (attention.q_proj, attention.k_proj, attention.v_proj)) is stacked


@pytest.mark.parametrize("head", [True, False])
def test_embeddings_as_input_are_refused(head: bool) -> None:
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    with pytest.raises(ValueError, match="give `input_ids`, not `inputs_embeds`"):
        (ours if head else ours.esmc)(inputs_embeds=torch.zeros(1, 3, ours.config.hidden_size))


def test_contacts_are_refused() -> None:
    with pytest.raises(ValueError, match="ESM-C has no contact head"):
        TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact").esmc.predict_contacts(*random_ids([9]))


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[17, 5, 30, 1], [12, 12]], ids=["ragged", "full"])
def test_the_packed_encoder_computes_the_same(lengths: list[int]) -> None:
    """With PyTorch's operations in float32, sums in another order."""
    hf = make_esmc(layers=3)
    ours = TurboEsmcModel.from_esm(hf.esmc, preset="exact")
    ids, mask = random_ids(lengths, masks=0)
    recorder = Recorder()
    packing, last, states = run_packed(ours, ids, mask, session=recorder, layers=range(3))
    expected = hf.esmc(ids, mask, output_hidden_states=True).hidden_states
    for found, other in zip([*states.values(), last], expected, strict=True):
        assert (packing.unpack(found) - other)[mask.bool()].abs().max() <= 2e-5
    kept = ours(ids, mask, use_cache=True).past_key_values.layers
    for (keys, _), layer in zip(recorder.seen, kept, strict=True):
        differs = (keys - layer.packed["keys"]).transpose(1, 2)[mask.bool()]
        assert differs.abs().max() <= 2e-5
    # The library's weights are views of the stacked ones now: nothing has changed.
    assert torch.equal(hf.esmc(ids, mask).last_hidden_state, expected[-1])


@pytest.fixture(scope="module")
def cuda_models() -> dict[torch.dtype, TurboEsmcForMaskedLM]:
    hf = make_esmc(heads=15, head_dim=64, layers=3, intermediate_size=2560)
    calibration = make_calibration(hf, residues=2048)
    return {
        dtype: TurboEsmcForMaskedLM.from_esm(copy.deepcopy(hf), calibration=calibration).to("cuda", dtype).eval()
        for dtype in DTYPES
    }


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_rows_err_as_hugging_face_does(
    cuda_models: dict[torch.dtype, TurboEsmcForMaskedLM], dtype: torch.dtype, use_cache: bool
) -> None:
    lengths = [70, 5, 130, 1]
    ids, mask = (x.cuda() for x in random_ids(lengths, masks=0))
    model, exact = cuda_models[dtype], cuda_models[torch.float32](ids, mask).logits
    plain, found = (
        model(ids, mask, use_cache=use_cache, **options).logits for options in ({}, {"row_lengths": lengths})
    )
    assert not torch.equal(plain, found)
    errors = [(one.float() - exact)[mask.bool()].square().mean().sqrt() for one in (found, plain)]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", ["exact", "paper", *TURBO])
def test_extensions_and_captures_on_cuda(
    cuda_models: dict[torch.dtype, TurboEsmcForMaskedLM], dtype: torch.dtype, preset: str
) -> None:
    """A recurring extension and prefill, captured, and the eager ones against PyTorch's backend."""
    model = cuda_models[dtype]
    ids, _ = (x.cuda() for x in random_ids([100]))
    new = random_ids([13] * 4, seed=5, cls=False)[0].cuda()
    states: dict[str, Tensor] = {}
    for backend, captures in (("torch", False), ("triton", False), ("triton", True)):
        model.set_turbo(calibration=model.base_model.calibration, preset=preset, backend=backend)
        model.base_model.captures = captures
        for _ in range(3):
            cache = model(ids, use_cache=True, row_lengths=[100]).past_key_values
            found = model(new, past_key_values=cache).logits
        assert (len(model.base_model.executor.graphs) > 0) == captures
        states[f"{backend} {captures}"] = found.float()
    model.base_model.captures = True
    expected = states["torch False"]
    for name in ("triton False", "triton True"):
        tolerance = 1e-3 if dtype == torch.float32 else 0.08
        assert relative_error(states[name], expected) < tolerance, name


BAR = 31
# Two chains with a break between them, which belongs to the first.
CHAINS = torch.tensor([[0] * 8 + [1] * 6, [0] * 5 + [1] * 4 + [-1] * 5])


def two_chains() -> tuple[Tensor, Tensor]:
    ids, mask = random_ids([14, 9])
    ids[0, 7] = ids[1, 4] = BAR
    return ids, mask


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_chains_are_exact(attention: str) -> None:
    hf = make_esmc(attn_implementation=attention)
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    ids, mask = two_chains()
    options = {"sequence_id": CHAINS, "output_hidden_states": True}
    expected = hf(ids, **options)
    for given in ({}, {"attention_mask": mask}):
        assert_same_output(ours(ids, **options, **given), expected)
        cached = ours(ids, use_cache=True, **options, **given)
        assert_same_output(cached, expected)
        assert cached.past_key_values.lengths.tolist() == [14, 9]
        assert torch.equal(cached.past_key_values.chains[1, :9], CHAINS[1, :9].int())
    assert not torch.equal(expected.logits, hf(ids, mask).logits)


@pytest.mark.gpu
@torch.no_grad()
def test_chains_may_be_given_on_the_host(cuda_models: dict[torch.dtype, TurboEsmcForMaskedLM]) -> None:
    ids, mask = two_chains()
    model = cuda_models[torch.float32]
    expected = model(ids.cuda(), mask.cuda(), sequence_id=CHAINS.cuda(), use_cache=True)
    found = model(ids, mask, sequence_id=CHAINS, use_cache=True)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.past_key_values.chains, expected.past_key_values.chains)


@torch.no_grad()
@pytest.mark.parametrize("chain", [0, 1])
@pytest.mark.parametrize("whole", [False, True], ids=["of new tokens", "of all tokens"])
def test_an_extension_of_one_chain_sees_that_chain(chain: int, whole: bool) -> None:
    """A token of the chain in its own place has the states of the exact run; one that sees all chains does not."""
    hf = make_esmc(layers=3)
    ours = TurboEsmcForMaskedLM.from_esm(hf, preset="exact")
    ids, _ = two_chains()
    ids, chains = ids[:1], CHAINS[:1]
    expected = hf(ids, sequence_id=chains).logits
    cache = ours(ids, sequence_id=chains, use_cache=True).past_key_values
    for at in (chains[0] == chain).nonzero()[:, 0].tolist():
        seen = torch.ones(1, 15, dtype=torch.int64)
        seen[:, at] = 0
        own = torch.full((1, 1), chain)
        given = torch.cat([chains, own], dim=1) if whole else own
        args = ids[:, at : at + 1], seen, torch.tensor([[at]])
        one = ours(*args, given, past_key_values=cache)
        assert (one.logits[:, 0] - expected[:, at]).abs().max() <= 2e-5
        assert (ours(*args, past_key_values=cache).logits[:, 0] - expected[:, at]).abs().max() > 1e-3


@torch.no_grad()
def test_rows_name_contexts_of_several_chains() -> None:
    """Each row sees its own chain of the context that it names, as where it has that context for itself."""
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    ids, _ = two_chains()
    cache = ours(ids, sequence_id=CHAINS, use_cache=True).past_key_values
    new, index, chains = torch.tensor([[5, 6], [7, 8], [5, 6], [9, 4]]), [1, 0, 0, 1], [0, 1, 0, 1]
    own = torch.tensor(chains)[:, None].expand(-1, 2)
    found = ours(new, sequence_id=own, past_key_values=cache, context_index=index).logits
    for row, context in enumerate(index):
        alone = cache.select(context)
        expected = ours(new[[row]], sequence_id=own[[row]], past_key_values=alone).logits
        assert (found[row] - expected[0]).abs().max() <= 2e-5
        assert (ours(new[[row]], past_key_values=alone).logits[0] - expected[0]).abs().max() > 1e-3
    whole = torch.cat([torch.full((4, 14), 5), own], dim=1)
    with pytest.raises(ValueError, match="says chain 5 of token 0 in row 0, the cache 0"):
        ours(new, sequence_id=whole, past_key_values=cache, context_index=index)


@torch.no_grad()
def test_chains_are_appended_saved_and_cut(tmp_path: Path) -> None:
    hf = make_esmc()
    ours = TurboEsmcForMaskedLM.from_esm(hf, calibration=make_calibration(hf), preset=DEFAULT_PRESET)
    ids, _ = two_chains()
    cache = ours(ids, sequence_id=CHAINS, use_cache=True).past_key_values
    new = torch.tensor([[5, 6], [7, 8]])
    ours(new, sequence_id=torch.tensor([[1, 1], [0, -1]]), past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [16, 10]
    expected = [[*CHAINS[0].tolist(), 1, 1], [*CHAINS[1, :9].tolist(), 0]]
    cache.save(tmp_path / "cache")
    read = TurboKVCache.load(tmp_path / "cache", model=ours)
    for one in (cache, read, TurboKVCache.cat([read.select(0), read.select(1)])):
        assert [one.chains[row, :length].tolist() for row, length in enumerate((16, 10))] == expected
    one = TurboKVCache.cat([read.select(1), ours(ids[:1], use_cache=True).past_key_values])
    assert one.chains[1].tolist() == [0] * 14
    read.crop(12)
    assert read.chains[0].tolist() == expected[0][:12]
    with pytest.raises(ValueError, match="several chains: say by `sequence_id` which one appended tokens belong to"):
        ours(new, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [16, 10]


@pytest.mark.parametrize("number", [2**31, 2**32 + 1])
@torch.no_grad()
def test_chains_beyond_what_a_cache_stores_are_refused(number: int) -> None:
    model = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    ids, _ = two_chains()
    chains = torch.where(CHAINS == 1, number, CHAINS)
    cache = model(ids, sequence_id=CHAINS, use_cache=True).past_key_values
    for options in ({"use_cache": True}, {"past_key_values": cache}):
        given = chains if "use_cache" in options else chains[:, :2] + number
        with pytest.raises(ValueError, match=r"chains in `sequence_id` may be numbered up to \d+, got"):
            model(ids[:, : given.shape[1]], sequence_id=given, **options)


def test_what_runs_residues_again_takes_one_chain() -> None:
    """They would see all chains, while what is cached of them has seen its own."""
    turbo = TurboEsm.from_pretrained(ESMC_MINI, device="cpu", preset="exact")
    with torch.no_grad():
        cache = turbo.model(random_ids([14])[0], sequence_id=CHAINS[:1], use_cache=True).past_key_values
    for call in (turbo.score, turbo.score_variants):
        with pytest.raises(ValueError, match=r"a (target|wild type) cannot be a cache of several chains"):
            call(cache, ["A1G"] if call == turbo.score_variants else ["AG"])
    with pytest.raises(ValueError, match="would see all chains of the context: give `refresh=0`"):
        turbo.extend(cache, "AG")
    assert turbo.extend(cache, "AG", refresh=0).logits.shape[1] == 3


@torch.no_grad()
def test_one_chain_is_stored_as_before(tmp_path: Path) -> None:
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    ids, _ = random_ids([14])
    cache = ours(ids, sequence_id=torch.zeros_like(ids), use_cache=True).past_key_values
    assert cache.chains is None
    ours(ids[:, :1], sequence_id=torch.tensor([[3]]), past_key_values=cache, use_cache=True)
    assert cache.chains.tolist() == [[0] * 14 + [3]]


@torch.no_grad()
@pytest.mark.parametrize(
    ("chains", "mask", "message"),
    [
        (torch.tensor([[0] * 13]), None, r"`sequence_id` must be \[1, 14\], got \[1, 13\]"),
        (torch.zeros(1, 14), None, r"`sequence_id` must be integers, got torch.float32"),
        (torch.tensor([[0] * 14]), torch.tensor([[1] * 13 + [0]]), "contradict each other: -1 is for padding"),
        (torch.tensor([[-1] + [0] * 13]), None, "padded on the left or has holes"),
    ],
)
def test_chains_that_contradict_the_context_are_refused(chains: Tensor, mask: Tensor | None, message: str) -> None:
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    with pytest.raises(ValueError, match=message):
        ours(random_ids([14])[0], mask, sequence_id=chains, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ([[0, 1]], r"puts the new tokens of row 0 into chains \[0, 1\]: extend one at a time"),
        ([[0] * 14 + [1, 1]], r"says chain 0 of token 8 in row 0, the cache 1: give it for the new tokens alone"),
        ([[0] * 3], r"`sequence_id` must be \[1, 2\] or \[1, 16\], got \[1, 3\]"),
    ],
)
def test_chains_that_contradict_the_cache_are_refused(chains: list[list[int]], message: str) -> None:
    ours = TurboEsmcForMaskedLM.from_esm(make_esmc(), preset="exact")
    cache = ours(random_ids([14])[0], sequence_id=CHAINS[:1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=message):
        ours(torch.tensor([[5, 6]]), sequence_id=torch.tensor(chains), past_key_values=cache)
    for columns in (3, 15):
        with pytest.raises(ValueError, match=f"`attention_mask` has {columns} columns; needed are 2"):
            ours(
                torch.tensor([[5, 6]]),
                torch.ones(1, columns),
                sequence_id=torch.tensor([[0, 0]]),
                past_key_values=cache,
            )
