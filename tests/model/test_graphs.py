"""Graphs that calls share: padding, and what makes a graph unusable."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.calibration import OtherWeightsWarning
from esm_turbo.codecs.row_index import RowIndex
from esm_turbo.model.graphs import Bucket, Caller, GraphPool
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.ops import triton_encoder
from tests.helpers import torch_encoder
from tests.helpers.graphs import pool_without_cuda, stand_in
from tests.helpers.models import MASK, make_config, random_ids, rounding

MakeModel = Callable[..., TurboEsmForMaskedLM]
ROUNDING = 2 * rounding(make_config())


@pytest.fixture
def captures() -> list[Callable[[], Tensor]]:
    return []


@torch.no_grad()
def contexts(model: TurboEsmForMaskedLM, lengths: list[int], seed: int = 0) -> TurboKVCache:
    ids, mask = (x.to(model.device) for x in random_ids(lengths, seed=seed))
    return model(ids, mask, use_cache=True).past_key_values


@torch.no_grad()
def eager(model: TurboEsmForMaskedLM, *inputs: object) -> Tensor:
    return model.esm(*inputs[1:], past_key_values=inputs[0]).last_hidden_state


def pooled(
    pool: GraphPool,
    model: TurboEsmForMaskedLM,
    cache: TurboKVCache,
    *inputs: Tensor | None,
    index: RowIndex | None = None,
    uses: int = 1,
    addresses: tuple[int, ...] = (1,),
) -> Tensor | None:
    caller = Caller(model.esm.executor, addresses, uses)
    return pool.extend(caller, cache, ForwardInputs(*inputs, context_index=index))


def inputs_for(model: TurboEsmForMaskedLM, cache: TurboKVCache, lengths: list[int], seed: int = 1):
    ids, mask = (x.to(model.device) for x in random_ids(lengths, cls=False, seed=seed, masks=1))
    positions = cache.next_positions[:, None] + torch.arange(ids.shape[1], device=model.device)
    return ids, mask, positions.expand(len(ids), -1)


@pytest.mark.parametrize("preset", ["exact", "paper", "turbo3"])
@torch.no_grad()
def test_results_are_those_of_eager_calls(tiny_model: MakeModel, captures: list, preset: str) -> None:
    """For contexts of other lengths, other numbers of rows and tokens, and masks, in one graph."""
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    for lengths, new, hides in [
        ([21, 9, 13], [4, 2, 3], False),
        ([5, 30, 3, 8], [7, 5, 1, 3], True),
        ([40, 33, 2], [8, 8, 8], True),
    ]:
        cache = contexts(model, lengths, seed=len(captures))
        ids, mask, positions = inputs_for(model, cache, new)
        past = torch.ones(len(ids), cache.get_seq_length(), dtype=torch.int64) * cache.valid()
        past[:, 1] = 0
        masks = [torch.cat([past, mask], dim=1)] if hides else [mask, None]
        for one in masks:
            expected = eager(model, cache, ids, one, positions)
            found = pooled(pool, model, cache, ids, one, positions, uses=2)
            shown = mask.bool() if one is not None else torch.ones_like(mask, dtype=torch.bool)
            assert found.shape == expected.shape
            assert (found - expected)[shown].abs().max() <= ROUNDING * expected.abs().max()
    assert len(captures) == len(pool) == 1


@pytest.mark.parametrize("preset", ["kivi4", "qjl_outliers"])
@torch.no_grad()
def test_contexts_that_store_more_per_row_are_not_read_by_graphs(
    turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    captures = stand_in(monkeypatch)
    model = TurboEsmForMaskedLM.from_esm(turbo.model, preset=preset)
    for length in (10, 10, 10, 40):
        cache = contexts(model, [length])
        inputs = inputs_for(model, cache, [3])
        expected = eager(model, cache.select(0), *inputs)
        model.esm.decoded(cache)
        assert (eager(model, cache, *inputs) - expected).abs().max() <= ROUNDING * expected.abs().max()
    assert not captures


@pytest.mark.parametrize("preset", ["paper", "turbo3"])
@torch.no_grad()
def test_rows_that_name_their_contexts_share_a_graph(tiny_model: MakeModel, captures: list, preset: str) -> None:
    """For other contexts and indexes, numbers of rows, and masks; rows come back in their order."""
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    for lengths, index, hides in [
        ([21, 9, 13], [2, 0, 2, 1, 0], False),
        ([5, 30, 3, 8], [3, 3, 1, 1, 0, 2, 3, 0], True),
        ([40, 33, 2], [0, 0, 0, 0, 0, 0], True),
    ]:
        cache, rows = contexts(model, lengths, seed=len(index)), RowIndex(np.array(index))
        ids, mask = random_ids([4, 2, 3, 1, 4, 4, 2, 1][: len(index)], cls=False, seed=1, masks=1)
        positions = cache.next_positions[index][:, None] + torch.arange(ids.shape[1])
        past = torch.ones(len(ids), cache.get_seq_length(), dtype=torch.int64) * cache.valid()[index]
        past[:, 1] = 0
        for one in [torch.cat([past, mask], dim=1)] if hides else [mask, None]:
            expected = model.esm(ids, one, positions, past_key_values=cache, context_index=index).last_hidden_state
            found = pooled(pool, model, cache, ids, one, positions, uses=10, index=rows)
            shown = mask.bool() if one is not None else torch.ones_like(mask, dtype=torch.bool)
            assert (found - expected)[shown].abs().max() <= ROUNDING * expected.abs().max()
    assert len(captures) == len(pool) == 1
    # More contexts than rows would be copied in vain.
    many = contexts(model, [5] * 9)
    inputs, last = inputs_for(model, many.select([0]), [3]), RowIndex(np.array([8]))
    assert pooled(pool, model, many, *inputs, uses=10, index=last) is None


@torch.no_grad()
def test_a_shape_is_captured_when_it_recurs(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [12])
    inputs = inputs_for(model, cache, [4])
    assert pooled(pool, model, cache, *inputs) is None
    assert pooled(pool, model, cache, *inputs) is not None
    longer = inputs_for(model, cache, [20])
    assert pooled(pool, model, cache, *longer) is None
    assert len(captures) == 1
    assert pooled(pool, model, cache, *inputs_for(model, cache, [4097])) is None


@torch.no_grad()
def test_layouts_have_graphs_of_their_own(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(preset="turbo4"), pool_without_cuda(captures)
    cache = contexts(model, [12])
    inputs = inputs_for(model, cache, [4])
    before = pooled(pool, model, cache, *inputs, uses=2)
    cache.drop_refinements()
    found = pooled(pool, model, cache, *inputs, uses=2)
    assert len(captures) == 2
    assert not torch.equal(found, before)
    assert (found - eager(model, cache, *inputs)).abs().max() <= ROUNDING * found.abs().max()


@torch.no_grad()
def test_moved_parameters_drop_all_graphs(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [12])
    inputs = inputs_for(model, cache, [4])
    pooled(pool, model, cache, *inputs, uses=2)
    assert pooled(pool, model, cache, *inputs, addresses=(2,)) is None
    assert len(pool) == 0


@torch.no_grad()
def test_rows_that_name_their_contexts_are_captured_later(tiny_model: MakeModel, captures: list) -> None:
    """They come in many shapes."""
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [21, 9])
    inputs, index = inputs_for(model, cache, [4, 2]), RowIndex(np.array([1, 0]))
    for _ in range(9):
        assert pooled(pool, model, cache, *inputs, index=index) is None
    assert pooled(pool, model, cache, *inputs, index=index) is not None
    assert len(captures) == 1


@torch.no_grad()
def test_graphs_are_limited_in_number_and_memory(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(preset="turbo3"), pool_without_cuda(captures, most=2)
    cache = contexts(model, [12])
    sizes = [4, 12, 20, 28]
    for size in sizes:
        pooled(pool, model, cache, *inputs_for(model, cache, [size]), uses=2)
    assert len(pool) == 2
    # Graphs with contexts of one size share them.
    assert len({id(contexts) for contexts in pool.caches}) == 1
    assert pooled(pool, model, cache, *inputs_for(model, cache, [4])) is None
    pool.memory_limit = 3 * sum(tensor.nbytes for _, tensor in pool.caches[0].named_tensors()) // 2
    longer = contexts(model, [200])
    pooled(pool, model, longer, *inputs_for(model, longer, [4]), uses=2)
    assert len(pool) == 1


@torch.no_grad()
def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(tiny_model: MakeModel) -> None:
    def refuse(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore lines")

    model, pool = tiny_model(), GraphPool(refuse)
    cache = contexts(model, [12])
    inputs = inputs_for(model, cache, [4])
    with pytest.warns(UserWarning, match=r"a forward could not be captured.*Tried to allocate 20.00 GiB$"):
        assert pooled(pool, model, cache, *inputs, uses=2) is None
    for _ in range(3):
        assert pooled(pool, model, cache, *inputs, uses=2) is None
    assert len(pool) == 0


@torch.no_grad()
def test_a_graph_keeps_what_it_reads(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(preset="turbo3"), pool_without_cuda(captures)
    cache = contexts(model, [12])
    pooled(pool, model, cache, *inputs_for(model, cache, [4]), uses=2)
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    # The caller's cache is copied, not kept.
    assert kept() is None


def test_copies_of_a_model_have_their_own_graphs(tiny_model: MakeModel, captures: list) -> None:
    model = tiny_model()
    model.esm.executor.graphs = pool_without_cuda(captures)
    cache = contexts(model, [12])
    pooled(model.esm.executor.graphs, model, cache, *inputs_for(model, cache, [4]), uses=2)
    assert len(model.esm.executor.graphs) == 1
    assert len(copy.deepcopy(model).esm.executor.graphs) == 0
    assert len(pickle.loads(pickle.dumps(model.esm.executor.graphs))) == 0
    model.set_turbo(preset="exact")
    assert len(model.esm.executor.graphs) == 0


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed encoder's reference in place of its kernels."""
    for name in torch_encoder.__all__:
        monkeypatch.setattr(triton_encoder, name, getattr(torch_encoder, name))


def prefilled(pool: GraphPool, model: TurboEsmForMaskedLM, ids: Tensor, uses: int = 1):
    counts = (torch.tensor([ids.shape[1]]), (ids == MASK).sum(1))
    inputs = ForwardInputs(ids, token_counts=counts)
    return pool.prefill(Caller(model.esm.executor, (1,), uses), model.new_cache(), inputs)


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@torch.no_grad()
def test_prefills_are_those_of_eager_calls(
    tiny_model: MakeModel, captures: list, without_triton: None, preset: str
) -> None:
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    for n in (1, 60, 128, 3):
        ids, _ = random_ids([n], masks=min(1, n - 1), seed=n)
        expected = model.esm(ids, use_cache=True)
        states, cache = prefilled(pool, model, ids, uses=2)
        assert (states - expected.last_hidden_state).abs().max() <= ROUNDING * states.abs().max()
        assert cache.lengths.tolist() == [n]
        assert torch.equal(cache.token_ids, expected.past_key_values.token_ids)
        assert torch.equal(cache.protected_columns, expected.past_key_values.protected_columns)
        # Codes may differ where rounding does: what is read from them may not.
        inputs = inputs_for(model, cache, [5])
        found, wanted = (eager(model, one, *inputs) for one in (cache, expected.past_key_values))
        assert (found - wanted).abs().max() <= (ROUNDING if preset == "exact" else 2e-2) * wanted.abs().max()
    assert len(captures) == len(pool) == 1


@torch.no_grad()
def test_a_prefill_does_not_change_contexts_made_before(
    tiny_model: MakeModel, captures: list, without_triton: None
) -> None:
    model, pool = tiny_model(preset="turbo3"), pool_without_cuda(captures)
    _, first = prefilled(pool, model, random_ids([20], seed=1)[0], uses=2)
    before = {name: tensor.clone() for name, tensor in first.named_tensors()}
    prefilled(pool, model, random_ids([30], seed=2)[0])
    for name, tensor in first.named_tensors():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("preset", ["paper", "turbo3"])
@torch.no_grad()
def test_decoded_contexts_are_read_alike(tiny_model: MakeModel, captures: list, preset: str) -> None:
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    for lengths in ([21], [70], [5]):
        cache = contexts(model, lengths)
        inputs = inputs_for(model, cache, [6] * 3)
        expected = eager(model, cache, *inputs)
        by_graph = pool.decode(Caller(model.esm.executor, (1,), 2), cache)
        for decoded in (model.esm.decoded(cache), by_graph):
            assert decoded.config.codec == "exact"
            assert decoded.lengths.tolist() == lengths
            found = eager(model, decoded, *inputs)
            assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()
    assert len(pool) == 1
    several = contexts(model, [9, 4])
    inputs = inputs_for(model, several, [2, 3])
    found, expected = (eager(model, one, *inputs) for one in (model.esm.decoded(several), several))
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()
    assert model.esm.decoded(decoded) is decoded
    with pytest.raises(ValueError, match="the cache is empty"):
        model.esm.decoded(model.new_cache())


@torch.no_grad()
def test_changed_weights(tiny_model: MakeModel, captures: list) -> None:
    """Contexts that graphs share, and decoded ones, are those of the weights of the call."""
    model, pool = tiny_model(preset="paper"), pool_without_cuda(captures)
    cache = contexts(model, [12])
    pooled(pool, model, cache, *inputs_for(model, cache, [4]), uses=2)
    others = pool_without_cuda(captures)
    others.decode(Caller(model.esm.executor, (1,), 2), cache)
    model.esm.encoder.layer[1].output.dense.weight.mul_(1.5)
    model.refresh_fingerprint()
    with pytest.warns(OtherWeightsWarning):
        cache = contexts(model, [12])
    for n in (20, 4):
        inputs = inputs_for(model, cache, [n])
        expected = eager(model, cache, *inputs)
        decoded = others.decode(Caller(model.esm.executor, (1,)), cache)
        for found in (pooled(pool, model, cache, *inputs, uses=2), eager(model, decoded, *inputs)):
            assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()
    assert len({id(contexts) for contexts in pool.caches}) == 1


@torch.no_grad()
def test_masks_of_another_shape_are_left_to_the_eager_path(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [12, 9])
    ids, mask, positions = inputs_for(model, cache, [4, 3])
    pooled(pool, model, cache, ids, mask, positions, uses=2)
    for shape in ((1, 4), (2, 3), (2, 15), (2, 17), (1, 16)):
        assert pooled(pool, model, cache, ids, torch.ones(shape, dtype=torch.int64), positions) is None
    assert pooled(pool, model, cache, ids, mask, positions) is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32], ids=str)
@torch.no_grad()
def test_dtypes_of_inputs(tiny_model: MakeModel, captures: list, dtype: torch.dtype) -> None:
    model, pool = tiny_model(preset="turbo3"), pool_without_cuda(captures)
    cache = contexts(model, [12, 9])
    ids, mask, positions = inputs_for(model, cache, [4, 3])
    expected = pooled(pool, model, cache, ids, mask, positions, uses=2)
    found = pooled(pool, model, cache, ids.int(), mask.to(dtype), positions.int())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@torch.no_grad()
def test_nothing_is_left_of_a_context_with_nan(tiny_model: MakeModel, captures: list, preset: str) -> None:
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    bad = contexts(model, [40])
    for name, tensor in bad.named_tensors():
        if tensor.is_floating_point() and ".packed." in name:
            tensor[:, :, 20:] = float("nan")
    inputs = inputs_for(model, bad, [4])
    pooled(pool, model, bad, *inputs, uses=2)
    good = contexts(model, [12])
    inputs = inputs_for(model, good, [4])
    found, expected = pooled(pool, model, good, *inputs), eager(model, good, *inputs)
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@torch.no_grad()
def test_a_failed_call_leaves_the_pool_usable(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [12])
    ids, mask, positions = inputs_for(model, cache, [4])
    pooled(pool, model, cache, ids, mask, positions, uses=2)
    with pytest.raises(RuntimeError):
        pooled(pool, model, cache, ids, mask, positions.expand(3, -1))
    expected = eager(model, cache, ids, mask, positions)
    found = pooled(pool, model, cache, ids, mask, positions)
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@torch.no_grad()
def test_shapes_in_turn_are_rarely_captured_again(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures, most=2)
    cache = contexts(model, [12])
    for _ in range(11):
        for size in (4, 12, 20):
            pooled(pool, model, cache, *inputs_for(model, cache, [size]))
    assert len(captures) <= 6


def test_padding_is_at_most_half_of_a_long_call() -> None:
    for number in range(1, 4097):
        bucket = Bucket.of(1, number, 1, number)
        assert bucket is not None
        assert number <= bucket.tokens <= max(number + 7, 1.5 * number)
        assert number <= bucket.columns <= max(number + 127, 1.5 * number)


# On a device.


@pytest.fixture
def on_cuda(tiny_model: MakeModel) -> Callable[..., TurboEsmForMaskedLM]:
    def make(preset: str = "turbo3", dtype: torch.dtype = torch.bfloat16) -> TurboEsmForMaskedLM:
        return tiny_model(preset=preset, layers=4, head_dim=32).to("cuda", dtype)

    return make


def states(model: TurboEsmForMaskedLM, cache: TurboKVCache, *inputs: object, captures: bool = True) -> Tensor:
    model.esm.captures = captures
    with torch.no_grad():
        return eager(model, cache, *inputs)


# Graphs pad to other tilings.
ON_DEVICE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().max() <= ON_DEVICE[found.dtype] * expected.float().abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("exact", torch.bfloat16), ("paper", torch.float16), ("turbo3", torch.bfloat16), ("turbo1", torch.float32)],
    ids=str,
)
def test_replays_equal_eager_calls(on_cuda: MakeModel, preset: str, dtype: torch.dtype) -> None:
    model = on_cuda(preset, dtype)
    for seed, (lengths, new) in enumerate([([21, 9, 13], [4, 2, 3]), ([5, 30, 3, 8], [8, 5, 1, 3]), ([90], [2] * 4)]):
        cache = contexts(model, lengths, seed)
        ids, mask, positions = inputs_for(model, cache, new)
        past = torch.ones(len(ids), cache.get_seq_length(), dtype=torch.int64, device="cuda") * cache.valid()
        past[:, 1] = 0
        for one in (mask, torch.cat([past, mask], dim=1)):
            expected = states(model, cache, ids, one, positions, captures=False)
            for _ in range(3):
                found = states(model, cache, ids, one, positions)
                assert_same(found[mask.bool()], expected[mask.bool()])
    assert len(model.esm.executor.graphs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "dtype", "graphs"),
    [("exact", torch.bfloat16, 0), ("turbo3", torch.bfloat16, 1), ("turbo2", torch.float32, 1)],
    ids=str,
)
@torch.no_grad()
def test_replays_of_named_contexts_equal_eager_calls(
    on_cuda: MakeModel, preset: str, dtype: torch.dtype, graphs: int
) -> None:
    model = on_cuda(preset, dtype)
    for seed, (lengths, index) in enumerate([([21, 9, 13], [2, 0, 2, 1, 0]), ([50, 3], [1, 1, 0, 1, 0, 0, 1, 1])]):
        cache = contexts(model, lengths, seed)
        ids, mask = (x.cuda() for x in random_ids([5, 3, 4, 5, 1, 2, 5, 5][: len(index)], cls=False, seed=seed))
        outputs = []
        # Once eagerly, then until it is captured, and a replay.
        for captures in (False, *[True] * 11):
            model.esm.captures = captures
            outputs.append(model.esm(ids, mask, past_key_values=cache, context_index=index).last_hidden_state)
        for output in outputs[1:]:
            assert_same(output[mask.bool()], outputs[0][mask.bool()])
    assert len(model.esm.executor.graphs) == graphs


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@torch.no_grad()
def test_replayed_prefills_equal_eager_ones(on_cuda: MakeModel, preset: str) -> None:
    model = on_cuda(preset)
    for n in (1, 60, 128, 3):
        ids = random_ids([n], masks=min(1, n - 1), seed=n)[0].cuda()
        outputs = []
        for captures in (False, True, True, True):
            model.esm.captures = captures
            outputs.append(model.esm(ids, use_cache=True, row_lengths=[n]))
        expected = outputs[0]
        inputs = inputs_for(model, expected.past_key_values, [5])
        wanted = states(model, expected.past_key_values, *inputs, captures=False)
        for output in outputs[1:]:
            assert_same(output.last_hidden_state, expected.last_hidden_state)
            cache = output.past_key_values
            assert cache.get_seq_length() == n
            assert torch.equal(cache.token_ids, expected.past_key_values.token_ids)
            assert_same(states(model, cache, *inputs, captures=False), wanted)
    assert len(model.esm.executor.graphs) == 1


@pytest.mark.gpu
def test_weights_changed_between_calls(on_cuda: MakeModel) -> None:
    model = on_cuda()
    cache = contexts(model, [30])
    inputs = inputs_for(model, cache, [5])
    first = [states(model, cache, *inputs) for _ in range(3)][-1]
    dense = model.esm.encoder.layer[1].output.dense

    def replaced() -> None:
        dense.weight = torch.nn.Parameter(dense.weight.detach() * 1.5)

    for change in (lambda: dense.weight.data.mul_(1.5), replaced):
        with torch.no_grad():
            change()
        cache = contexts(model, [30])
        for _ in range(3):
            found = states(model, cache, *inputs)
        assert_same(found, states(model, cache, *inputs, captures=False))
        assert (found - first).float().abs().max() > 10 * ON_DEVICE[torch.bfloat16]
        first = found
    assert len(model.esm.executor.graphs) == 1


@pytest.mark.gpu
def test_what_rounds_products_changed_between_calls(on_cuda: MakeModel) -> None:
    model, before = on_cuda(dtype=torch.float32), torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            cache = contexts(model, [30])
            inputs = inputs_for(model, cache, [5])
            for _ in range(3):
                found = states(model, cache, *inputs)
        assert_same(found, states(model, cache, *inputs, captures=False))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
def test_hooks_and_autocast_run_eagerly(on_cuda: MakeModel) -> None:
    model = on_cuda()
    cache = contexts(model, [30])
    inputs = inputs_for(model, cache, [5])
    for _ in range(3):
        states(model, cache, *inputs)
    seen: list[int] = []
    handle = model.esm.encoder.layer[0].output.dense.register_forward_hook(lambda *_: seen.append(1))
    model.esm.model_id = "with a hook that counts"
    cache = contexts(model, [30])
    seen.clear()
    states(model, cache, *inputs)
    assert seen == [1]
    handle.remove()
    uncaptured = on_cuda(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        cache = contexts(uncaptured, [30])
        for _ in range(3):
            states(uncaptured, cache, *inputs_for(uncaptured, cache, [5]))
    assert len(uncaptured.esm.executor.graphs) == 0


@pytest.mark.gpu
def test_inference_mode(on_cuda: MakeModel) -> None:
    model = on_cuda()
    with torch.inference_mode():
        cache = contexts(model, [30])
        inputs = inputs_for(model, cache, [5])
        found = [eager(model, cache, *inputs) for _ in range(4)]
    outside = contexts(model, [30])
    for one in (*found[2:], eager(model, outside, *inputs)):
        assert_same(one, found[0])
    assert len(model.esm.executor.graphs) == 1


@pytest.mark.gpu
def test_a_call_inside_a_capture_of_the_caller_s_is_part_of_it(on_cuda: MakeModel) -> None:
    model = on_cuda()
    cache = contexts(model, [30])
    inputs = inputs_for(model, cache, [5])
    expected = [states(model, cache, *inputs) for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = states(model, cache, *inputs)
    graph.replay()
    assert_same(output, expected)


@pytest.mark.gpu
def test_threads_that_use_a_new_model_at_once(on_cuda: MakeModel) -> None:
    """One fuses weights while others capture graphs, which must not see them half moved."""
    made = on_cuda()
    weights = {name: x.clone() for name, x in made.state_dict().items()}

    def use(model: TurboEsmForMaskedLM, seed: int) -> list[Tensor]:
        cache = contexts(model, [40 + 30 * seed], seed)
        inputs = inputs_for(model, cache, [5 + seed], seed)
        return [states(model, cache, *inputs) for _ in range(6)]

    expected = [use(copy.deepcopy(made), seed) for seed in range(4)]
    for _ in range(10):
        model = copy.deepcopy(made)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(partial(use, model), range(4)))
        for one, other in zip(found, expected, strict=True):
            for state, wanted in zip(one, other, strict=True):
                assert_same(state, wanted)
        assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
