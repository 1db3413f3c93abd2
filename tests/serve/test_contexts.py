"""Contexts of the service: named ones on disk, derived ones in memory."""

from __future__ import annotations

import pytest
import torch

from esm_turbo import ContextStore
from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.errors import RequestError
from esm_turbo.tasks.common.forwards import prefill_ids

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"


@pytest.fixture
def contexts(turbo, tmp_path):
    with ContextStore(tmp_path / "store") as store:
        yield Contexts(turbo, store, limit=3)


def files(contexts):
    return sorted(path.stem for path in contexts.store.folder.rglob("*.safetensors") if len(path.stem) == 64)


def test_named_contexts_are_found_again(contexts, turbo):
    keys = contexts.add([SEQUENCE, "ACD"])
    assert files(contexts) == sorted(keys)
    assert contexts.add([SEQUENCE]) == keys[:1]
    assert contexts.stored == 2
    # As after a restart.
    again = Contexts(turbo, ContextStore(contexts.store.folder))
    assert [again.sequence(key) for key in keys] == [SEQUENCE, "ACD"]
    assert again.stored == 2
    with pytest.raises(RequestError, match="no context of this id"):
        again.sequence("0" * 64)


def test_a_damaged_context_is_not_found_and_can_be_added_again(contexts, turbo):
    [key] = contexts.add([SEQUENCE])
    [path] = contexts.store.folder.rglob(f"{key}.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    again = Contexts(turbo, ContextStore(contexts.store.folder))
    with pytest.raises(RequestError, match="post its sequence"):
        again.sequence(key)
    assert again.add([SEQUENCE]) == [key]
    assert again.sequence(key) == SEQUENCE


def test_contexts_of_other_commands_have_no_name(contexts, turbo):
    ids = [turbo.codes.cls, *turbo.codes.encode(SEQUENCE, "it"), turbo.codes.eos]
    prefill_ids(turbo, ids, "turbo", contexts.store)
    [key] = files(contexts)
    with pytest.raises(RequestError, match="no context of this id"):
        contexts.sequence(key)


def test_contexts_that_are_not_stored_are_computed_as_given(contexts, turbo):
    codes, computed = turbo.codes, []
    ids = [codes.cls, *codes.encode(SEQUENCE, "it"), codes.mask, codes.eos]
    config = turbo.model.base_model.turbo_config

    def compute():
        computed.append(1)
        return prefill_ids(turbo, ids, "turbo")

    assert contexts.get_or_compute(turbo, ids, config, compute).get_seq_length() == len(ids)
    assert computed == [1] and files(contexts) == []
    # One without masks and <eos> is read from the store, where it is.
    contexts.add([SEQUENCE])
    plain = contexts.get_or_compute(turbo, ids[:-2], config, compute)
    assert computed == [1]
    for name, tensor in turbo.prefill(SEQUENCE).named_tensors():
        assert torch.equal(tensor, dict(plain.named_tensors())[name])


def test_contexts_that_requests_read_stay_in_memory_within_a_budget(turbo, tmp_path):
    cache = turbo.prefill(SEQUENCE)
    contexts = Contexts(turbo, ContextStore(tmp_path), budget=2 * cache.nbytes)
    first = contexts.ready("a", lambda: turbo.prefill(SEQUENCE))
    assert contexts.ready("a", lambda: pytest.fail("it is in memory")) is first
    for key in ("b", "c"):
        contexts.ready(key, lambda: turbo.prefill(SEQUENCE))
    assert contexts.ready("a", lambda: turbo.prefill(SEQUENCE)) is not first
    assert contexts.resident.nbytes == 2 * cache.nbytes


def test_the_store_is_limited(contexts):
    contexts.add(["ACD", "CDE", "DEF"])
    assert contexts.add(["CDE"])
    with pytest.raises(RequestError, match="the store holds 3 contexts, its limit") as full:
        contexts.add(["EFG"])
    assert full.value.status == 507


def test_decoded_contexts_are_kept_within_the_budget(contexts, turbo):
    cache = turbo.prefill(SEQUENCE)
    assert contexts.ready("a", lambda: cache, 1) is cache
    largest = contexts.ready("a", lambda: cache, 10_000).nbytes
    contexts = Contexts(turbo, contexts.store, budget=2 * largest + cache.nbytes)
    decoded = [contexts.ready(key, lambda: cache, 10_000) for key in "abc"]
    assert {one.config.name for one in decoded} == {"exact"}
    assert contexts.ready("c", lambda: pytest.fail("it is in memory"), 10_000) is decoded[2]
    assert contexts.ready("a", lambda: cache, 10_000) is not decoded[0]
    assert contexts.resident.nbytes <= contexts.resident.budget
    # For rows that hide tokens of it on a device.
    assert contexts.ready("a", lambda: pytest.fail("it is in memory")) is cache
