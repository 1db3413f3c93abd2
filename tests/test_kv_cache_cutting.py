"""Rows cut out of a batch, whose tensors are made when they are first used."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.kv.layer import TurboCacheLayer
from esm_turbo.ops.copies import CutRow
from tests.helpers.models import CACHE_CONFIGS
from tests.test_kv_cache import append, prefill

MakeModel = Callable[..., TurboEsmForMaskedLM]
LENGTHS = [40, 17, 1]


@pytest.fixture(scope="module")
def models(tiny_model: MakeModel) -> dict[str, TurboEsmForMaskedLM]:
    return {name: tiny_model(preset=config, calibrated=True) for name, config in CACHE_CONFIGS.items()}


@pytest.fixture
def model(tiny_model: MakeModel) -> TurboEsmForMaskedLM:
    return tiny_model(preset="turbo3")


def is_made(cache: TurboKVCache) -> bool:
    return "layers" in vars(cache)


def assert_same(a: TurboKVCache, b: TurboKVCache) -> None:
    found, expected = dict(a.named_tensors()), dict(b.named_tensors())
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_layers_are_made_when_first_used(model: TurboEsmForMaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prefill(model, LENGTHS)
    for on_cpu in (True, False):
        # On a device nothing may wait for values.
        monkeypatch.setattr(TurboKVCache, "_on_cpu", on_cpu)
        for length, row in zip(LENGTHS, cache.cut(LENGTHS), strict=True):
            assert (row.batch_size, row.columns, row.get_seq_length()) == (1, length, length)
            assert row.lengths.tolist() == [length]
            assert row.device == cache.device
            assert row.codec is cache.codec
            assert not is_made(row)
            layers = row.layers
            assert is_made(row)
            assert row.layers is layers
            assert len(layers) == len(cache.layers)
            assert row.token_ids.untyped_storage().data_ptr() == layers[0].packed["key_0"].untyped_storage().data_ptr()


OPERATIONS = st.one_of(
    st.tuples(st.just("crop"), st.integers(-5, 45)),
    st.tuples(st.just("append"), st.integers(1, 5)),
    st.tuples(st.just("select"), st.just(0)),
    st.tuples(st.just("repeat"), st.just(2)),
    st.tuples(st.just("copy"), st.sampled_from([copy.copy, copy.deepcopy])),
    st.tuples(st.just("cut"), st.none()),
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    operations=st.lists(OPERATIONS, max_size=3),
    name=st.sampled_from(sorted(CACHE_CONFIGS)),
    eos=st.booleans(),
)
def test_a_cut_row_is_the_row_selected(
    models: dict[str, TurboEsmForMaskedLM],
    lengths: list[int],
    operations: list[tuple[str, object]],
    name: str,
    eos: bool,
) -> None:
    """Byte for byte, also after operations, of which the first finds no layers."""
    model = models[name]
    cache = prefill(model, lengths, eos=eos and min(lengths) > 1)
    for row, cut in enumerate(cache.cut(lengths)):
        pair = [cut, cache.select(row)]
        for operation, argument in operations:
            for at, one in enumerate(pair):
                if operation == "crop":
                    one.crop(argument)
                elif operation == "append" and one.batch_size == 1:
                    append(model, one, [argument])
                elif operation == "repeat":
                    one.batch_repeat_interleave(argument)
                elif operation == "select":
                    pair[at] = one.select(argument)
                elif operation == "copy":
                    pair[at] = argument(one)
                elif operation == "cut":
                    pair[at] = one.cut(one.lengths.tolist())[0]
        assert_same(*pair)
        assert pair[0].nbytes == pair[1].nbytes


@pytest.mark.parametrize("made", [False, True])
def test_a_cut_row_is_pickled_copied_and_saved(model: TurboEsmForMaskedLM, tmp_path: Path, made: bool) -> None:
    cache = prefill(model, LENGTHS)
    for row, cut in enumerate(cache.cut(LENGTHS)):
        if made:
            assert cut.layers
        pickled = pickle.dumps(cut)
        # Neither the row's buffer a second time nor the codec.
        assert len(pickled) < cache.select(row).nbytes + 30_000
        path = tmp_path / f"{row}.safetensors"
        cut.save(path)
        copies = [pickle.loads(pickled), TurboKVCache.load(path), copy.copy(cut), copy.deepcopy(cut)]
        for other in copies:
            assert_same(other, cache.select(row))
        buffer = cut.token_ids.untyped_storage().data_ptr()
        held = {tensor.untyped_storage().data_ptr() for _, tensor in copies[3].named_tensors() if tensor.numel()}
        assert buffer not in held
        assert copies[0].codec is None


def test_a_row_replaces_what_another_cache_had(model: TurboEsmForMaskedLM) -> None:
    cache, other = prefill(model, LENGTHS), prefill(model, [9, 4])
    other.take_over(cache.cut(LENGTHS)[0])
    assert_same(other, cache.select(0))
    row = cache.cut(LENGTHS)[1]
    row.reset()
    assert (row.batch_size, row.nbytes) == (0, 0)
    append(model, row, [5])
    assert row.lengths.tolist() == [5]


def test_layers_are_made_once_for_all_threads(model: TurboEsmForMaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    make = CutRow.tensors

    def slowly(self: CutRow) -> list[Tensor]:
        time.sleep(0.02)
        return make(self)

    cache = prefill(model, LENGTHS)
    [row, *_] = cache.cut(LENGTHS)
    monkeypatch.setattr(CutRow, "tensors", slowly)
    start = threading.Barrier(8)

    def read(_: int) -> list[TurboCacheLayer]:
        start.wait()
        return row.layers

    with ThreadPoolExecutor(8) as threads:
        assert all(layers is row.layers for layers in threads.map(read, range(8)))
    assert_same(row, cache.select(0))


def test_a_cut_row_keeps_its_own_buffer_alive_and_no_other(model: TurboEsmForMaskedLM) -> None:
    cache = prefill(model, LENGTHS)
    batch = [weakref.ref(tensor.untyped_storage()) for _, tensor in cache.named_tensors() if tensor.numel()]
    rows = cache.cut(LENGTHS)
    buffers = [weakref.ref(row.token_ids.untyped_storage()) for row in rows]
    sizes = [row.token_ids.untyped_storage().nbytes() for row in rows]
    assert sizes[2] < sizes[1] < sizes[0] < 2 * cache.nbytes
    del cache
    gc.collect()
    assert not any(is_made(row) for row in rows)
    assert all(storage() is None for storage in batch)
    # Also those whose layers nobody asked for.
    first = rows.pop(0)
    del rows
    gc.collect()
    assert [storage() is None for storage in buffers] == [False, True, True]
    assert first.layers
    first.crop(3)
    gc.collect()
    assert buffers[0]() is None


@pytest.mark.parametrize("lengths", [[3, 2, 1, 1], [3, 12, 1], [9, 4]])
def test_other_lengths_than_the_rows_are_not_cut(model: TurboEsmForMaskedLM, lengths: list[int]) -> None:
    cache = prefill(model, [9, 5, 7])
    with pytest.raises(ValueError, match=r"are not the tokens of 3 rows of at most 9$"):
        cache.cut(lengths)
