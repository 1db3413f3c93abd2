"""The cache on its own: counts, appends, reshaping and files."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import ModelOutput

from esm_turbo import TurboConfig, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.codecs import ExactCodec, KVCodec
from esm_turbo.config import Geometry
from esm_turbo.files import artifacts
from esm_turbo.files.identity import UNKNOWN_MODEL
from esm_turbo.kv.tensors import axis_of
from esm_turbo.kv_cache import FORMAT_VERSION
from esm_turbo.model.plan import ForwardPlan
from esm_turbo.ops.backends import TorchBackend
from tests.helpers.codec_samples import certain_tokens
from tests.helpers.models import CACHE_CONFIGS, CLS, EOS, MASK, make_calibration, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]
PAPER = TurboConfig()


@pytest.fixture
def model(tiny_model: MakeModel, cache_config: TurboConfig) -> TurboEsmForMaskedLM:
    return tiny_model(preset=cache_config, calibrated=True)


@torch.no_grad()
def prefill(model: TurboEsmForMaskedLM, lengths: list[int], seed: int = 0, **options: object) -> TurboKVCache:
    return model(*random_ids(lengths, seed=seed, **options), use_cache=True).past_key_values


@torch.no_grad()
def append(
    model: TurboEsmForMaskedLM, cache: TurboKVCache, lengths: list[int], seed: int = 1, **options: object
) -> None:
    ids, mask = random_ids(lengths, seed=seed, **({"cls": False} | options))
    model(ids, mask, past_key_values=cache, use_cache=True)


@torch.no_grad()
def probe(model: TurboEsmForMaskedLM, cache: TurboKVCache) -> Tensor:
    """Logits of three tokens after each row, which depend on everything in the cache; the cache is not changed."""
    ids = torch.tensor([[5, MASK, 9]]).expand(cache.batch_size, -1)
    return model(ids, past_key_values=cache, output_hidden_states=True).logits


def row_bytes(cache: TurboKVCache, row: int) -> dict[str, Tensor]:
    """Everything stored for the tokens of one row, by name, without padding."""
    length = int(cache.lengths[row])
    slots = (cache.protected_columns[row] >= 0).nonzero()[:, 0]
    positions = torch.arange(cache.columns, dtype=torch.int32) if cache.positions is None else cache.positions[row]
    stored = {
        "token_ids": cache.token_ids[row, :length],
        "positions": positions[:length],
        "protected_columns": cache.protected_columns[row, slots],
    }
    for index, layer in enumerate(cache.layers):
        stored |= {f"{index}.packed.{name}": tensor[row, :, :length] for name, tensor in layer.packed.items()}
        stored |= {f"{index}.protected.{name}": tensor[row][:, slots] for name, tensor in layer.protected.items()}
        stored |= {f"{index}.rows.{name}": tensor[row] for name, tensor in layer.rows.items()}
    return stored


def assert_rows_equal(
    a: TurboKVCache, rows_a: list[int], b: TurboKVCache, rows_b: list[int], bfloat16_rtol: float = 0.0
) -> None:
    for row_a, row_b in zip(rows_a, rows_b, strict=True):
        stored_a, stored_b = row_bytes(a, row_a), row_bytes(b, row_b)
        assert stored_a.keys() == stored_b.keys()
        for name, tensor in stored_a.items():
            rtol = bfloat16_rtol if tensor.dtype == torch.bfloat16 else 0.0
            equal = torch.allclose(tensor, stored_b[name], rtol=rtol, atol=rtol)
            assert tensor.dtype == stored_b[name].dtype
            assert equal, f"{name} of rows {row_a} and {row_b}"


def assert_caches_equal(a: TurboKVCache, b: TurboKVCache) -> None:
    assert torch.equal(a.lengths, b.lengths)
    assert a.nbytes == b.nbytes
    assert_rows_equal(a, list(range(a.batch_size)), b, list(range(b.batch_size)))


def test_lengths(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [9, 4, 13])
    assert isinstance(cache, transformers.Cache)
    assert cache.lengths.dtype == torch.int64
    assert cache.lengths.tolist() == [9, 4, 13]
    assert type(cache.get_seq_length()) is int
    assert [cache.get_seq_length(), cache.get_seq_length(1), cache.columns, cache.batch_size] == [13, 13, 13, 3]
    assert cache.next_positions.tolist() == [9, 4, 13]
    assert len(cache) == 2
    append(model, cache, [1, 5, 2])
    assert cache.lengths.tolist() == [10, 9, 15]
    assert cache.get_seq_length() == 15


def select_nothing(cache: TurboKVCache) -> None:
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("empty", [None, TurboKVCache.reset, select_nothing])
def test_an_empty_cache_is_filled_by_a_prefill(
    model: TurboEsmForMaskedLM, empty: Callable[[TurboKVCache], None] | None
) -> None:
    cache = model.new_cache()
    if empty is not None:
        cache = prefill(model, [9, 4], seed=3)
        empty(cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.nbytes, cache.lengths.tolist()) == (0, 0, 0, [])
    assert math.isnan(cache.bits_per_element)
    ids, mask = random_ids([9, 4])
    with torch.no_grad():
        output = model(ids, mask, past_key_values=cache, use_cache=True)
        untouched = model(ids, mask, past_key_values=model.new_cache())
    assert output.past_key_values is cache
    assert_caches_equal(cache, prefill(model, [9, 4]))
    assert untouched.past_key_values is None


@pytest.mark.parametrize(
    ("preset", "dtype", "bits"),
    [
        ("exact", torch.float32, 32),
        ("exact", torch.bfloat16, 16),
        # Three bits and a sign.
        (PAPER, torch.float32, 4),
        (replace(PAPER, bits=1), torch.float32, 2),
    ],
    ids=str,
)
def test_bytes(tiny_model: MakeModel, preset: str | TurboConfig, dtype: torch.dtype, bits: float) -> None:
    """17 tokens x 2 layers x 4 heads x 16 components x (key and value), one byte per token for its id, 8 per row."""
    cache = prefill(tiny_model(preset=preset).to(dtype), [12, 5])
    assert cache.nbytes == 17 * 2 * 4 * 16 * 2 * bits / 8 + 17 + 2 * 8
    assert cache.bits_per_element == 8 * cache.nbytes / (2 * 2 * 4 * 16 * 17)


def test_bytes_of_protected_tokens(tiny_model: MakeModel) -> None:
    """A protected token takes its bfloat16 key and value and a column number in addition to its codes."""
    model, token = tiny_model(preset=replace(PAPER, protect_special_tokens=True)), 2 * 4 * 16 * 2 * 2 + 4
    assert prefill(model, [12, 5], eos=True).nbytes == 2209 + 4 * token
    assert prefill(model, [12, 5], cls=False).nbytes == 2209
    # Rows that protect fewer tokens than others take no more for it.
    assert TurboKVCache.cat([prefill(model, [12]), prefill(model, [5], eos=True)]).nbytes == 2209 + 3 * token


def test_bytes_of_positions(tiny_model: MakeModel) -> None:
    """Positions are stored if they are not the next ones, four bytes per token."""
    model, (ids, mask) = tiny_model(preset=PAPER), random_ids([12, 5])
    for first, positions_bytes, following in (([[0], [0]], 0, [12, 5]), ([[0], [3]], 17 * 4, [12, 8])):
        with torch.no_grad():
            positions = torch.arange(12)[None] + torch.tensor(first)
            cache = model(ids, mask, positions, use_cache=True).past_key_values
        assert (cache.positions is None) == (positions_bytes == 0)
        assert cache.nbytes == 2209 + positions_bytes
        assert cache.next_positions.tolist() == following


# Protected tokens and sums over a row are rounded less than codes: their last bit depends on the shape of a product.
LAST_BIT = 2**-7


def test_batch_and_single_prefill_store_the_same_bytes(cache_config: TurboConfig, tiny_model: MakeModel) -> None:
    """Given the same keys and values, a row's codes depend neither on other rows nor on padding."""
    codec = tiny_model(preset=cache_config).esm.codec(cache_config)
    lengths = [11, 30, 1, 7]
    batch = random_cache(codec, lengths, seed=3)
    for row, length in enumerate(lengths):
        alone = random_cache(codec, lengths, seed=3, only=row)
        assert alone.lengths.tolist() == [length]
        assert_rows_equal(batch, [row], alone, [0], LAST_BIT)


def test_prefill_in_one_step_or_by_appending_stores_the_same_bytes(
    cache_config: TurboConfig, tiny_model: MakeModel
) -> None:
    codec = tiny_model(preset=cache_config).esm.codec(cache_config)
    ids, keys, values = random_kv(codec, [24, 24], seed=5)
    whole, pieces = new_cache(codec), new_cache(codec)
    write(whole, ids, torch.ones_like(ids).bool(), keys, values)
    for part in (slice(0, 10), slice(10, 11), slice(11, 24)):
        write(pieces, ids[:, part], torch.ones_like(ids[:, part]).bool(), keys[..., part, :], values[..., part, :])
    assert whole.nbytes == pieces.nbytes
    for layer, other in zip(whole.layers, pieces.layers, strict=True):
        # Tensors per row are made from the first tokens only.
        layer.rows = other.rows = {}
    assert_rows_equal(whole, [0, 1], pieces, [0, 1], LAST_BIT)


def test_codes_beyond_a_row_are_never_read(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [3, 20, 9])
    before = probe(model, cache)
    for layer in cache.layers:
        for tensor in layer.packed.values():
            for row, length in enumerate(cache.lengths.tolist()):
                tensor[row, :, length:] = 1e30 if tensor.is_floating_point() else 255
    cache.token_ids[0, 3:] = MASK
    assert torch.equal(probe(model, cache), before)


def test_named_tensors_are_complete(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    """A cache made from them is equal; their names are those in files."""
    cache = prefill(model, [9, 4], eos=True)
    with torch.no_grad():
        model(torch.tensor([[7], [8]]), None, torch.tensor([[30], [31]]), past_key_values=cache, use_cache=True)
    named = dict(cache.named_tensors())
    made = TurboKVCache.from_tensors(cache.config, cache.geometry, cache.identity, cache.codec, named)
    assert_caches_equal(made, cache)
    assert all(tensor is named[name] for name, tensor in made.named_tensors())
    cache.save(tmp_path / "cache.safetensors")
    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        assert named.keys() == set(file.keys()) - {"codec_fingerprint"}
    packed = next(iter(cache.layers[0].packed))
    assert {"lengths", "token_ids", "positions", "protected_columns", f"layers.0.packed.{packed}"} <= named.keys()
    for wrong in ("layers.0.other.keys", "keys", "layers.keys"):
        with pytest.raises(ValueError, match=f"a cache has no tensor '{wrong}'"):
            axis_of(wrong)


def test_a_pickle_holds_what_a_file_does(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    """Neither the codec nor spare columns; the copy is claimed when it is used."""
    cache = prefill(model, [70, 9])
    append(model, cache, [3, 3])
    cache.crop(-60)
    cache.save(tmp_path / "cache.safetensors")
    pickled = pickle.dumps(cache)
    assert len(pickled) < (tmp_path / "cache.safetensors").stat().st_size + 20_000
    other = pickle.loads(pickled)
    assert other.codec is None
    assert_caches_equal(other, cache)
    assert torch.equal(probe(model, other), probe(model, cache))
    append(model, other, [2, 2])
    assert cache.lengths.tolist() == [13, 0]
    # A copy in the same process shares the codec.
    assert copy.deepcopy(cache).codec is cache.codec


def test_positions_are_never_stored_beyond_their_dtype(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [6])
    with torch.no_grad():
        model(torch.tensor([[7]]), None, torch.tensor([[2**31 - 1]]), past_key_values=cache, use_cache=True)
        assert cache.positions.max() == 2**31 - 1
        with pytest.raises(ValueError, match="must lie in 0 to 2147483647, got 2147483648"):
            model(torch.tensor([[7]]), past_key_values=cache, use_cache=True)


def buffer_of(cache: TurboKVCache, name: str = "token_ids") -> int:
    return dict(cache.named_tensors())[name].untyped_storage().data_ptr()


@torch.no_grad()
def test_appends_are_written_in_place(model: TurboEsmForMaskedLM) -> None:
    """Forty appends allocate a few buffers; contents and results equal those of a dense cache to the last bit."""
    cache = prefill(model, [20, 17])
    name = next(name for name, _ in cache.named_tensors() if "packed" in name)
    buffers, at_once = [buffer_of(cache, name)], []
    for step in range(40):
        seen = dict(cache.named_tensors())
        before = {key: tensor[0, ..., :20, :].clone() for key, tensor in seen.items() if "packed" in key}
        append(model, cache, [1, 1], seed=step)
        assert all(torch.equal(seen[key][0, ..., :20, :], tensor) for key, tensor in before.items())
        buffers.append(buffer_of(cache, name))
        assert cache.columns == cache.get_seq_length() == 21 + step
        at_once.append(probe(model, cache))
    changes = [a != b for a, b in itertools.pairwise(buffers)]
    assert changes[0] and 2 <= sum(changes) <= 4
    dense = cache.select([0, 1])
    assert buffer_of(dense, name) != buffer_of(cache, name)
    assert all(tensor.is_contiguous() for _, tensor in dense.named_tensors())
    assert_caches_equal(cache, dense)
    assert torch.equal(probe(model, dense), at_once[-1])


def test_padding_does_not_depend_on_spare_columns(model: TurboEsmForMaskedLM) -> None:
    """Files include the padding of short rows: columns that were cropped and are written again start as zeros."""
    in_place, dense = prefill(model, [20, 17]), prefill(model, [20, 17])
    for step, (lengths, kept) in enumerate([([8, 9], [10, 26]), ([2, 1], [3, 27]), ([30, 1], [30, 20]), ([1, 3], -1)]):
        for cache in (in_place, dense):
            append(model, cache, lengths, seed=step)
            cache.crop(torch.tensor(kept))
        dense = dense.select([0, 1])
        expected = dict(dense.named_tensors())
        for name, tensor in in_place.named_tensors():
            assert torch.equal(tensor, expected[name]), name


def test_crops_free_spare_columns(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [40])
    append(model, cache, [10])
    for kept in (50, 30, 12, 1):
        cache.crop(kept)
        for _, tensor in cache.named_tensors():
            assert tensor.untyped_storage().nbytes() <= max(64, 3 * tensor.nbytes)


def test_appends_in_other_modes(model: TurboEsmForMaskedLM) -> None:
    """Caches written in inference mode can be appended to outside of it, and vice versa."""
    caches = []
    for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        cache = model.new_cache()
        for step, mode in enumerate((*modes, *modes)):
            ids, mask = random_ids([9, 5], seed=step)
            with mode():
                model(ids, mask, past_key_values=cache, use_cache=True)
        caches.append(cache)
    assert_caches_equal(*caches)


def test_writing_layer_by_layer_is_refused(model: TurboEsmForMaskedLM) -> None:
    cache = model.new_cache()
    with pytest.raises(NotImplementedError, match="use_cache=True"):
        cache.update(torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16), 0)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(7, [7, 4, 7]), (4, [4, 4, 4]), (13, [9, 4, 13]), (100, [9, 4, 13]), (0, [0, 0, 0]),
     (-1, [8, 3, 12]), (-4, [5, 0, 9]), (-5, [4, 0, 8]), (-100, [0, 0, 0]),
     (10**30, [9, 4, 13]), (-(10**30), [0, 0, 0]),
     (torch.tensor([7, 0, 100]), [7, 0, 13]), (torch.tensor([-1, 2, -20]), [8, 2, 0]),
     (torch.tensor([9, 4, 13]), [9, 4, 13]), (torch.tensor(5), [5, 4, 5]), (torch.tensor(-4), [5, 0, 9])],
    ids=str,
)  # fmt: skip
def test_crop(model: TurboEsmForMaskedLM, n: int | Tensor, expected: list[int]) -> None:
    cache, whole = prefill(model, [9, 4, 13]), prefill(model, [9, 4, 13])
    cache.crop(n)
    assert cache.lengths.tolist() == expected
    assert cache.get_seq_length() == cache.columns == max(expected)
    for row, length in enumerate(expected):
        for name, tensor in row_bytes(cache, row).items():
            kept = row_bytes(whole, row)[name]
            if "protected" not in name and "rows" not in name:
                kept = kept[:, :length] if "packed" in name else kept[:length]
                assert torch.equal(tensor, kept)
    if model.esm.turbo_config.protect_special_tokens:
        assert (cache.protected_columns >= 0).sum() == sum(length > 0 for length in expected)


@pytest.mark.parametrize(
    "n",
    [
        torch.tensor([3, 4]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([True, False, True]),
        2.5,
        True,
    ],
)
def test_crop_refuses_other_types_and_shapes(model: TurboEsmForMaskedLM, n: Any) -> None:
    cache = prefill(model, [9, 4, 13])
    with pytest.raises(ValueError, match="`tokens` must be"):
        cache.crop(n)
    assert cache.lengths.tolist() == [9, 4, 13]


def test_a_cropped_cache_extends_and_grows(model: TurboEsmForMaskedLM) -> None:
    """Cropping equals hiding: the remaining columns at their positions, with the remaining counts."""
    cache, whole = prefill(model, [9, 5], masks=1), prefill(model, [9, 5], masks=1)
    cache.crop(4)
    ids = torch.tensor([[7, 8], [9, MASK]])
    mask = torch.ones(2, 9 + 2, dtype=torch.int64)
    mask[:, 4:9] = 0
    with torch.no_grad():
        hidden = model(ids, mask, torch.tensor([[4, 5]]), past_key_values=whole).logits
        cropped = model(ids, past_key_values=cache, use_cache=True).logits
    assert (hidden - cropped).abs().max() <= 2e-5
    assert cache.lengths.tolist() == [6, 6]


@torch.no_grad()
@pytest.mark.parametrize("appends", [False, True])
def test_a_cache_that_another_thread_changes(
    model: TurboEsmForMaskedLM, monkeypatch: pytest.MonkeyPatch, appends: bool
) -> None:
    ids, _ = random_ids([9])
    cache = model(ids, use_cache=True).past_key_values
    run = model.base_model.executor.run

    def run_meanwhile(plan: ForwardPlan) -> ModelOutput:
        monkeypatch.undo()
        cache.crop(6)
        model(ids[:, 4:7], past_key_values=cache, use_cache=True)
        return run(plan)

    monkeypatch.setattr(model.base_model.executor, "run", run_meanwhile)
    with pytest.raises(RuntimeError, match="the cache was changed during this call"):
        model(ids[:, 1:3], past_key_values=cache, use_cache=appends)
    assert cache.lengths.tolist() == [9]


@pytest.mark.parametrize("on_a_device", [False, True])
def test_crop_to_nothing_and_start_again(model: TurboEsmForMaskedLM, on_a_device: bool) -> None:
    """Without columns there are no slots; on a device one column stays, which kernels may read."""
    cache = prefill(model, [9, 4], eos=True)
    if on_a_device:
        cache.__class__ = ElsewhereCache
    cache.crop(0)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.columns == on_a_device and cache.protected_columns.shape[1] <= cache.columns
    ids, mask = random_ids([6, 3])
    with torch.no_grad():
        output = model(ids, mask, past_key_values=cache, use_cache=True)
        plain = model(ids, mask)
    assert (output.logits - plain.logits)[mask.bool()].abs().max() <= 2e-5
    assert cache.lengths.tolist() == [6, 3]


def test_storage_does_not_grow_if_lengths_are_unknown(tiny_model: MakeModel) -> None:
    """As on a GPU, where reading lengths would force a sync: upper bounds are used, and results are the same."""
    model = tiny_model(preset=CACHE_CONFIGS["protected"])
    known, unknown = prefill(model, [9, 4], eos=True), prefill(model, [9, 4], eos=True)
    unknown.__class__ = ElsewhereCache
    for step in range(4):
        for cache in (known, unknown):
            append(model, cache, [3, 2], seed=step, eos=step == 3)
            cache.crop(-2)
            append(model, cache, [1, 1], seed=step)
            cache.crop(9)
    assert known.lengths.tolist() == unknown.lengths.tolist()
    assert unknown.columns == 9
    assert unknown.protected_columns.shape[1] <= 2
    assert (probe(model, known) - probe(model, unknown)).abs().max() <= 2e-5
    unknown.crop(0)
    assert unknown.columns == 1


@pytest.mark.gpu
def test_special_tokens_and_empty_rows_on_a_device(tiny_model: MakeModel) -> None:
    model = tiny_model(preset=CACHE_CONFIGS["protected"]).to("cuda")
    cache = prefill(model, [9, 4], eos=True)
    for step in range(3):
        append(model, cache, [3, 2], seed=step, eos=True)
    for row in range(2):
        stored = {name: x.cpu() for name, x in row_bytes(cache, row).items()}
        special = torch.isin(stored["token_ids"], torch.tensor([CLS, EOS])).nonzero()[:, 0].tolist()
        assert sorted(stored["protected_columns"].tolist()) == special and len(special) == 5
    for emptied in (cache.select([0, 1, 1]), cache):
        emptied.crop(0)
        emptied = emptied.select([1, 0])
        assert torch.isfinite(probe(model, emptied)).all()
        append(model, emptied, [5, 7], seed=4)
        fresh = prefill(model, [5, 7], seed=4, cls=False)
        # Codes at a tie may differ.
        assert (probe(model, emptied) - probe(model, fresh)).abs().max() <= 5e-2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_rows_are_selected_by_integers_of_any_dtype(model: TurboEsmForMaskedLM, dtype: torch.dtype) -> None:
    cache, rows = prefill(model, [9, 4, 13], eos=True), torch.tensor([1, 1, 0], dtype=dtype)
    expected = probe(model, cache)[[1, 1, 0]]
    reordered, indexed = copy.copy(cache), copy.copy(cache)
    reordered.reorder_cache(rows)
    indexed.batch_select_indices(rows)
    for found in (cache.select(rows), cache.select(rows.tolist()), reordered, indexed):
        assert found.lengths.tolist() == [4, 4, 9] and found.columns == 9
        assert_rows_equal(found, [0, 1, 2], cache, [1, 1, 0])
        assert (probe(model, found) - expected).abs().max() <= 2e-5
    for one in (rows[0], 1):
        assert_rows_equal(cache.select(one), [0], cache, [1])
    with pytest.raises(IndexError):
        cache.select(rows + 2)


def test_rows_are_selected_by_a_mask_and_by_nothing_else(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [9, 4, 6])
    assert cache.select(torch.tensor([True, False, True])).lengths.tolist() == [9, 6]
    for wrong in (torch.tensor([0.5]), torch.tensor([[0, 1]]), torch.tensor(True)):
        with pytest.raises(ValueError, match=r"rows are integers \[rows\] or bool \[batch\]"):
            cache.select(wrong)
    for wrong in (torch.tensor(1), torch.tensor([[0, 1]])):
        with pytest.raises(ValueError, match="rows are integers"):
            cache.reorder_cache(wrong)
    with pytest.raises(ValueError, match="`repeats` must be at least 1, got 0"):
        cache.batch_repeat_interleave(0)
    assert cache.lengths.tolist() == [9, 4, 6]


@pytest.mark.parametrize("on_a_device", [False, True])
@pytest.mark.parametrize("stores_none", [False, True])
@torch.no_grad()
def test_an_empty_row_is_stored_as_a_new_one(
    tiny_model: Callable[..., TurboEsmForMaskedLM],
    monkeypatch: pytest.MonkeyPatch,
    on_a_device: bool,
    stores_none: bool,
) -> None:
    """Including tensors per row, while other rows keep theirs; a device does not check which rows are empty."""
    if on_a_device:
        monkeypatch.setattr(TurboKVCache, "_on_cpu", False)
    model = tiny_model(preset="turbo3")
    if stores_none:
        ids, mask = random_ids([9, 4])
        cache = model(
            ids, mask, use_cache=True, append_mask=mask.bool() & torch.tensor([[True], [False]])
        ).past_key_values
    else:
        cache = prefill(model, [9, 4])
        cache.crop(torch.tensor([5, 0]))
    kept = {name: x.clone() for name, x in cache.layers[0].rows.items()}
    ids, mask = random_ids([3, 6], seed=5)
    with torch.no_grad():
        model(ids, mask, past_key_values=cache, use_cache=True)
        fresh = model(ids[1:], mask[1:], use_cache=True).past_key_values
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        assert kept.keys() == ours.rows.keys() == theirs.rows.keys()
        for name, expected in theirs.rows.items():
            assert torch.allclose(ours.rows[name][1].float(), expected[0].float(), atol=1e-2, rtol=1e-2)
    assert all(torch.equal(cache.layers[0].rows[name][0], x[0]) for name, x in kept.items())
    assert not any(torch.equal(cache.layers[0].rows[name][1], x[1]) for name, x in kept.items())


def test_a_prefill_may_store_some_tokens_only(model: TurboEsmForMaskedLM) -> None:
    ids, mask = random_ids([6, 5])
    keep = mask.bool()
    keep[:, 4:] = False
    with torch.no_grad():
        output = model(ids, mask, use_cache=True, append_mask=keep)
        expected = model(ids, mask, use_cache=True)
    assert torch.equal(output.logits, expected.logits)
    cache = output.past_key_values
    assert cache.lengths.tolist() == [4, 4]
    # Codes depend on their own token only; tensors per row on all stored tokens.
    for ours, theirs in zip(cache.layers, expected.past_key_values.layers, strict=True):
        for name, tensor in ours.packed.items():
            assert torch.equal(tensor, theirs.packed[name][:, :, :4])


def test_cat(model: TurboEsmForMaskedLM) -> None:
    """Caches with different columns and slots, with and without positions."""
    parts = [prefill(model, [9, 4], seed=1), prefill(model, [13], seed=2, eos=True)]
    parts.append(prefill(model, [2], seed=3, cls=False))
    with torch.no_grad():
        model(torch.tensor([[7, 8]]), None, torch.tensor([[40, 44]]), past_key_values=parts[2], use_cache=True)
    joined = TurboKVCache.cat(parts)
    assert joined.lengths.tolist() == [9, 4, 13, 4]
    assert joined.next_positions.tolist() == [9, 4, 13, 45]
    assert_rows_equal(joined, [0, 1], parts[0], [0, 1])
    assert_rows_equal(joined, [2], parts[1], [0])
    assert_rows_equal(joined, [3], parts[2], [0])
    alone = torch.cat([probe(model, part) for part in parts])
    assert (probe(model, joined) - alone).abs().max() <= 2e-5
    append(model, joined, [1, 1, 1, 1])
    assert [part.lengths.tolist() for part in parts] == [[9, 4], [13], [4]]


def test_cat_of_one_and_of_empty_ones(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [9, 4])
    assert_caches_equal(TurboKVCache.cat([model.new_cache(), cache]), cache)
    assert TurboKVCache.cat([model.new_cache()]).batch_size == 0
    with pytest.raises(ValueError, match="at least one"):
        TurboKVCache.cat([])


def test_cat_refuses_different_kinds(tiny_model: MakeModel) -> None:
    exact, paper = tiny_model(preset="exact"), tiny_model(preset=PAPER)
    with pytest.raises(ValueError, match="presets exact and paper"):
        TurboKVCache.cat([prefill(exact, [3]), prefill(paper, [3])])
    other = tiny_model(preset="exact", seed=1)
    with pytest.raises(ValueError, match="different models"):
        TurboKVCache.cat([prefill(exact, [3]), prefill(other, [3])])


def test_to(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, [9, 4])
    assert cache.to("cpu") is cache
    assert_caches_equal(cache, prefill(model, [9, 4]))
    meta = copy.deepcopy(cache).to("meta")
    tensors = [t for layer in meta.layers for t in (*layer.packed.values(), *layer.protected.values())]
    assert {t.device.type for t in [*tensors, meta.lengths, meta.token_ids, meta.protected_columns]} == {"meta"}


def random_kv(codec: KVCodec, lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, and keys and values [layers, batch, heads, n, head_dim]; a row's are the same in any batch.

    Rounding changes none of their codes.
    """
    layers, heads, head_dim = codec.geometry.num_layers, codec.geometry.num_heads, codec.geometry.head_dim
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    shape = (layers, len(lengths), heads, max(lengths), head_dim)
    padding = torch.Generator().manual_seed(seed)
    keys, values = (1e3 * torch.randn(shape, generator=padding) for _ in range(2))
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        ids[row, :length] = torch.randint(0, 33, (length,), generator=generator)
        for layer in range(layers):
            drawn = certain_tokens(codec, layer, 1, length, generator)
            keys[layer, row, :, :length], values[layer, row, :, :length] = drawn[:, 0]
    return ids, keys, values


def new_cache(codec: KVCodec, cls: type[TurboKVCache] = TurboKVCache) -> TurboKVCache:
    return cls(codec.config, codec.geometry, UNKNOWN_MODEL, codec)


def write(
    cache: TurboKVCache, ids: Tensor, keep: Tensor, keys: Tensor, values: Tensor, positions: Tensor | None = None
) -> None:
    """Appends tokens to a cache without a model."""
    plan = cache.plan_append(ids, keep, positions, (CLS, EOS))
    for layer in range(cache.geometry.num_layers):
        cache.stage(plan, layer, keys[layer], values[layer], TorchBackend())
    cache.commit(plan)


def random_cache(codec: KVCodec, lengths: list[int], seed: int, only: int | None = None) -> TurboKVCache:
    ids, keys, values = random_kv(codec, lengths, seed)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    if only is not None:
        part = slice(only, only + 1), slice(0, lengths[only])
        ids, keep = ids[part], keep[part]
        keys, values = keys[:, part[0], :, part[1]], values[:, part[0], :, part[1]]
    cache = new_cache(codec)
    write(cache, ids, keep, keys, values)
    return cache


SMALL = ExactCodec(TurboConfig.from_preset("exact"), Geometry(1, 1, 4), {})
PROTECTING = ExactCodec(TurboConfig(codec="exact", protect_special_tokens=True), Geometry(1, 1, 4), {})


class ElsewhereCache(TurboKVCache):
    """A cache that behaves as on a device, where reading a value would force a sync."""

    _on_cpu = False


def check_against(cache: TurboKVCache, rows: list[list[tuple[int, int, float]]]) -> None:
    assert cache.lengths.tolist() == [len(row) for row in rows]
    assert cache.get_seq_length() == max(map(len, rows), default=0)
    assert cache.columns == cache.get_seq_length() or (not cache._on_cpu and cache.columns > cache.get_seq_length())
    for index, row in enumerate(rows):
        stored = row_bytes(cache, index)
        assert stored["token_ids"].tolist() == [token for token, _, _ in row]
        assert stored["positions"].tolist() == [position for _, position, _ in row]
        marks = torch.tensor([mark for _, _, mark in row])
        assert torch.equal(stored["0.packed.keys"][0, :, 0], marks)
        assert torch.equal(stored["0.packed.values"][0, :, 3], -marks)
        if cache.config.protect_special_tokens:
            columns = stored["protected_columns"].long()
            special = [c for c, (token, _, _) in enumerate(row) if token in (CLS, EOS)]
            assert sorted(columns.tolist()) == special
            assert torch.equal(stored["0.protected.keys"][0, :, 0].float(), marks[columns])
    assert cache.next_positions.tolist() == [max((p + 1 for _, p, _ in row), default=0) for row in rows]


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.tuples(st.integers(1, 5), st.integers(0, 2**31), st.booleans())),
    st.tuples(st.just("crop"), st.integers(-6, 12)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 10), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("cat"), st.integers(0, 10)),
    st.tuples(st.just("copy"), st.sampled_from([copy.copy, copy.deepcopy])),
    st.tuples(st.just("save"), st.none()),
)
Row = list[tuple[int, int, float]]
"""A row's tokens: id, position, and a mark in its key and value."""


def append_marks(cache: TurboKVCache, rows: list[Row], n: int, seed: int, moved: bool) -> list[Row]:
    """Appends random tokens, some of which are not kept; returns the new contents of each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 6, (len(rows), n), generator=generator)
    keep = torch.rand(len(rows), n, generator=generator) < 0.7
    marks = torch.randint(1, 200, (len(rows), n), generator=generator).float()
    keys = torch.zeros(1, len(rows), 1, n, 4)
    keys[0, :, 0, :, 0] = marks
    values = torch.zeros(1, len(rows), 1, n, 4)
    values[0, :, 0, :, 3] = -marks
    positions = torch.randint(0, 60, (len(rows), n), generator=generator) if moved else None
    grown = []
    for index, row in enumerate(rows):
        following = max((p + 1 for _, p, _ in row), default=0)
        kept = keep[index].nonzero()[:, 0].tolist()
        at = range(following, following + n) if positions is None else positions[index, kept].tolist()
        new = [(int(ids[index, i]), p, float(marks[index, i])) for i, p in zip(kept, at, strict=False)]
        grown.append([*row, *new])
    write(cache, ids, keep, keys, values, positions)
    return grown


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 3),
    steps=st.lists(st.tuples(OPERATIONS, st.integers(0, 10)), min_size=1, max_size=14),
    codec=st.sampled_from([SMALL, PROTECTING]),
    cls=st.sampled_from([TurboKVCache, ElsewhereCache]),
)
def test_any_sequence_of_operations(
    tmp_path_factory: pytest.TempPathFactory,
    batch: int,
    steps: list[tuple[tuple[str, Any], int]],
    codec: KVCodec,
    cls: type[TurboKVCache],
) -> None:
    """Caches behave like lists of tokens, and none changes a copy.

    Marks are small integers, exact in bfloat16.
    """
    caches, held = [new_cache(codec, cls)], [[[] for _ in range(batch)]]
    for (name, argument), chosen in [(("append", (3, 0, False)), 0), *steps]:
        at = chosen % len(caches)
        cache, rows = caches[at], held[at]
        if name == "append":
            held[at] = append_marks(cache, rows, *argument)
        elif name == "crop":
            cache.crop(argument)
            held[at] = [row[:argument] if argument >= 0 else row[: max(0, len(row) + argument)] for row in rows]
        elif name == "drop":
            cache.drop_front(argument)
            held[at] = [row[argument:] for row in rows]
        elif name == "select":
            indices = [index % len(rows) for index in argument]
            cache.batch_select_indices(torch.tensor(indices))
            held[at] = [rows[index] for index in indices]
        elif name == "repeat":
            cache.batch_repeat_interleave(argument)
            held[at] = [row for row in rows for _ in range(argument)]
        elif name == "save":
            path = tmp_path_factory.mktemp("cache") / "cache.safetensors"
            cache.save(path)
            caches[at] = cls.load(path)
            caches[at].codec = codec
        elif len(caches) <= 4 and len(rows) <= 8:
            other = argument % len(caches) if name == "cat" else at
            caches.append(cls.cat([cache, caches[other]]) if name == "cat" else argument(cache))
            held.append([*rows, *held[other]] if name == "cat" else rows)
        for cache, rows in zip(caches, held, strict=True):
            check_against(cache, rows)


@pytest.mark.parametrize("lengths", [[9, 4, 13], [1], [5, 5]], ids=str)
def test_save_and_load(model: TurboEsmForMaskedLM, tmp_path: Path, lengths: list[int]) -> None:
    cache = prefill(model, lengths, eos=max(lengths) > 1)
    cache.save(tmp_path / "cache.safetensors")
    for loaded in (
        TurboKVCache.load(tmp_path / "cache.safetensors"),
        TurboKVCache.load(str(tmp_path / "cache.safetensors"), device="cpu", model=model),
    ):
        assert_caches_equal(loaded, cache)
        assert loaded.config == cache.config
        assert loaded.geometry == cache.geometry
        assert torch.equal(probe(model, loaded), probe(model, cache))
    assert os.listdir(tmp_path) == ["cache.safetensors"]


def test_an_empty_cache_is_saved(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    model.new_cache().save(tmp_path / "cache.safetensors")
    assert TurboKVCache.load(tmp_path / "cache.safetensors", model=model).batch_size == 0
    cropped = prefill(model, [9, 4])
    cropped.crop(0)
    cropped.save(tmp_path / "cache.safetensors")
    loaded = TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
    assert loaded.lengths.tolist() == [0, 0]
    append(model, loaded, [2, 3])
    assert loaded.lengths.tolist() == [2, 3]


def test_a_cache_is_read_in_its_own_dtype_alone(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    prefill(model, [9, 4]).save(tmp_path / "cache.safetensors")
    half = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match="it was made in float32, and the model computes in bfloat16"):
        TurboKVCache.load(tmp_path / "cache.safetensors", model=half)


def test_files_are_plain(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    """A file holds tensors and JSON, its format version, and no more bytes than the cache and a header."""
    cache = prefill(model, [33, 33])
    for name in ("cache.safetensors", "again.safetensors"):
        cache.save(tmp_path / name)
    assert (tmp_path / "cache.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["kind"] == "cache"
    assert metadata["format_version"] == str(FORMAT_VERSION)
    assert json.loads(metadata["config"]) == cache.config.to_dict()
    assert (tmp_path / "cache.safetensors").stat().st_size < cache.nbytes + 8000


def test_another_model_refuses_a_cache(tiny_model: MakeModel, tmp_path: Path) -> None:
    mine, other = tiny_model(preset="exact"), tiny_model(preset="exact", seed=1)
    wider = tiny_model(preset="exact", layers=3)
    cache = prefill(mine, [9, 4])
    cache.save(tmp_path / "cache.safetensors")
    for model, message in ((other, "weights differ"), (wider, "3 layers")):
        with pytest.raises(ValueError, match=message):
            TurboKVCache.load(tmp_path / "cache.safetensors", model=model)
        with pytest.raises(ValueError, match=message):
            probe(model, cache)
        with pytest.raises(ValueError, match=message):
            probe(model, TurboKVCache.load(tmp_path / "cache.safetensors"))


def test_a_cache_on_another_device_is_refused(tiny_model: MakeModel) -> None:
    model = tiny_model(preset="exact")
    cache = prefill(model, [9, 4])
    with pytest.raises(ValueError, match=r"the cache is on meta, and the model on cpu: move it"):
        probe(model, cache.to("meta"))


def test_a_model_without_calibration_refuses_a_compressed_cache(tiny_model: MakeModel, tmp_path: Path) -> None:
    prefill(tiny_model(preset=PAPER), [9, 4]).save(tmp_path / "cache.safetensors")
    bare = tiny_model(preset="exact")
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        TurboKVCache.load(tmp_path / "cache.safetensors", model=bare)


def test_a_model_reads_caches_of_any_of_its_presets(tiny_model: MakeModel) -> None:
    """Options are stored in the cache: the model's own preset applies to new caches only."""
    paper = tiny_model(preset=PAPER)
    exact = tiny_model(preset="exact", calibrated=True)
    cache = prefill(paper, [9, 4])
    expected = probe(paper, cache)
    assert torch.equal(probe(exact, cache), expected)


def test_another_calibration_cannot_read_the_codes(tiny_model: MakeModel, tmp_path: Path) -> None:
    """With other tables than those that wrote them, codes would silently give wrong results."""
    model, other = tiny_model(preset=PAPER), tiny_model(preset=PAPER)
    other.set_turbo(calibration=make_calibration(other, residues=400), preset=PAPER)
    cache = prefill(model, [9, 4])
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="another calibration"):
        probe(other, cache)
    with pytest.raises(ValueError, match="another calibration"):
        TurboKVCache.load(tmp_path / "cache.safetensors", model=other)
    with pytest.raises(ValueError, match="another calibration"):
        probe(other, TurboKVCache.load(tmp_path / "cache.safetensors"))
    with pytest.raises(ValueError, match="different calibrations"):
        TurboKVCache.cat([cache, prefill(other, [3])])
    with pytest.raises(ValueError, match="another calibration"), torch.no_grad():
        other(*random_ids([3]), past_key_values=model.new_cache(), use_cache=True)
    assert torch.equal(probe(model, cache), probe(model, TurboKVCache.load(tmp_path / "cache.safetensors")))


def test_the_same_calibration_from_its_file_reads_the_codes(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Including options whose codec is not in the file and is fitted again."""
    for config in (PAPER, replace(PAPER, bits=2), CACHE_CONFIGS["protected"]):
        model = tiny_model(preset=config)
        model.esm.calibration.save(tmp_path / "calibration.safetensors")
        cache = prefill(model, [9, 4])
        expected = probe(model, cache)
        model.set_turbo(calibration=tmp_path / "calibration.safetensors", preset=config)
        assert torch.equal(probe(model, cache), expected)
        fresh = tiny_model(preset=config)
        fresh.set_turbo(calibration=make_calibration(fresh), preset=config)
        assert torch.equal(probe(fresh, cache), expected)


@pytest.fixture
def saved(tiny_model: MakeModel, tmp_path: Path) -> Path:
    path = tmp_path / "cache.safetensors"
    prefill(tiny_model(preset=PAPER), [9, 4]).save(path)
    return path


def test_files_that_are_no_cache(saved: Path, turbo: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.safetensors: no such cache file"):
        TurboKVCache.load(tmp_path / "nowhere.safetensors")
    turbo.calibration.save(tmp_path / "calibration.safetensors")
    with pytest.raises(ValueError, match="not an esm_turbo cache"):
        TurboKVCache.load(tmp_path / "calibration.safetensors")
    version = FORMAT_VERSION + 1
    rewrite(saved, strings={"format_version": str(version)})
    with pytest.raises(ValueError, match=f"cache format version {version}, this release reads"):
        TurboKVCache.load(saved)
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cache.safetensors: damaged"):
        TurboKVCache.load(saved)


def rewrite(path: Path, *, strings: dict[str, str] | None = None, drop: str | None = None, **tensors: Tensor) -> None:
    """Changes a file and updates its checksum."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata()) | (strings or {})
        content = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    if drop:
        content.pop(drop)
    metadata.pop("sha256")
    metadata["sha256"] = artifacts._digest(content, metadata)
    save_file(content, path, metadata=metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"drop": "lengths"},
        {"drop": "token_ids"},
        {"drop": "protected_columns"},
        {"drop": "codec_fingerprint"},
        {"strings": {"model": "{}"}},
        {"strings": {"model": '{"precision": 32, "weights": "", "options": "", "forward": ""}'}},
        {"drop": "layers.1.packed.keys"},
        {"strings": {"geometry": "{}"}},
        {"strings": {"geometry": '{"num_layers": 3, "num_heads": 4, "head_dim": 16}'}},
        {"strings": {"geometry": '{"num_layers": 1, "num_heads": 4, "head_dim": 16}'}},
        {"layers.0.other.keys": torch.zeros(2)},
        {"strings": {"geometry": '{"num_layers": 2, "num_heads": 8, "head_dim": 16}'}},
        {"strings": {"config": "not JSON"}},
        {"strings": {"config": '{"codec": "lut", "bits": 99}'}},
        {"strings": {"config": '{"of_the_future": 1}'}},
        {"lengths": torch.tensor([9, 99])},
        {"lengths": torch.tensor([9, -1])},
        {"lengths": torch.tensor([9, 4, 4])},
        {"token_ids": torch.zeros(2, 4, dtype=torch.uint8)},
        {"protected_columns": torch.zeros(5, 1, dtype=torch.int32)},
        {"protected_columns": torch.full((2, 1), 70, dtype=torch.int32)},
        {"positions": torch.zeros(2, 3, dtype=torch.int32)},
        {"lengths": torch.tensor([9.0, 4.0])},
        {"lengths": torch.tensor(9)},
        {"token_ids": torch.zeros(2, 9)},
        {"token_ids": torch.zeros(9, dtype=torch.uint8)},
        {"strings": {"geometry": '{"num_layers": -1, "num_heads": 4, "head_dim": 16}'}},
        {"strings": {"geometry": '{"num_layers": "2", "num_heads": 4, "head_dim": 16}'}},
    ],
    ids=lambda change: next(iter(change.items()))[0] + "=" + str(next(iter(change.values())))[:40],
)
def test_a_file_whose_entries_contradict_each_other(saved: Path, change: dict[str, object]) -> None:
    """Correct checksum, wrong content: an error on reading, not wrong results later."""
    rewrite(saved, **change)
    with pytest.raises(ValueError):
        TurboKVCache.load(saved)


@pytest.mark.parametrize("num_layers", [10**5, 10**8])
def test_a_number_of_layers_costs_no_memory(saved: Path, num_layers: int) -> None:
    """A file of a few kilobytes may claim any."""
    rewrite(saved, strings={"geometry": f'{{"num_layers": {num_layers}, "num_heads": 4, "head_dim": 16}}'})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"tensors are not those of {num_layers} layers"):
            TurboKVCache.load(saved)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_replaces_an_older_one_that_is_open(saved: Path, tiny_model: MakeModel) -> None:
    """A loaded cache does not change when its file is overwritten."""
    loaded = TurboKVCache.load(saved)
    before = loaded.layers[0].packed["keys"].clone()
    prefill(tiny_model(preset=PAPER), [9, 4], seed=9).save(saved)
    assert torch.equal(loaded.layers[0].packed["keys"], before)
