"""The pool of contexts: what it holds stays where and as it is, and its memory is not wasted."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo import ContextStore, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.store.files import context_spec
from esm_turbo.store.flat import ContextSpec, FlatContext, layout
from esm_turbo.store.pool import ContextPool, PoolHold, slot_columns

MakeModel = Callable[..., TurboEsmForMaskedLM]
CPU = torch.device("cpu")
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


@pytest.fixture(scope="module")
def tiny(turbo: TurboEsm, tiny_model: MakeModel) -> TurboEsm:
    return TurboEsm(tiny_model(preset=DEFAULT_PRESET), turbo.tokenizer)


@pytest.fixture(scope="module")
def spec(tiny: TurboEsm) -> ContextSpec:
    return context_spec(tiny)


def protein(length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(RESIDUES, k=length))


def context(tokens: int, value: int = 1, slots: int = 2) -> FlatContext:
    """A small context whose numbers are all `value`."""
    named = [
        ("lengths", torch.int64, (1,)),
        ("token_ids", torch.uint8, (1, tokens)),
        ("protected_columns", torch.int32, (1, slots)),
        ("layers.0.packed.keys", torch.uint8, (1, 2, tokens, 8)),
        ("layers.0.protected.keys", torch.bfloat16, (1, 2, slots, 4)),
        ("layers.0.rows.key_residual", torch.float32, (1, 2, 1, 4)),
    ]
    made = FlatContext.empty(layout(named), CPU)
    for tensor in made.tensors().values():
        tensor.fill_(value)
    return made


def key(number: int) -> tuple[str, str]:
    return "shelf", str(number)


def same(found: FlatContext | None, expected: FlatContext) -> bool:
    assert found is not None
    assert found.parts == expected.parts
    theirs = expected.tensors()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in found.tensors().items())


def test_sizes_of_slots() -> None:
    found = [slot_columns(tokens) for tokens in (1, 64, 65, 128, 129, 257, 385, 512, 513, 1000, 1025)]
    assert found == [64, 64, 128, 128, 192, 384, 512, 512, 768, 1024, 1536]
    assert all((slot_columns(n) - n) * 3 <= slot_columns(n) for n in range(129, 5000))


def test_contexts_come_back_as_they_were() -> None:
    """Also after a longer one, or one with more protected tokens, was in the same slot."""
    pool = ContextPool(30_000)
    first, second = context(60, 7), context(9, 3, slots=1)
    assert pool.put(key(0), first, CPU)
    assert same(pool.get(key(0), CPU), first)
    for number in range(1, 40):
        assert pool.put(key(number), second, CPU)
        assert same(pool.get(key(number), CPU), second)
    assert pool.evicted > 0
    assert pool.get(key(0), CPU) is None
    tensors = pool._slots[key(39), CPU].slab.tensors
    row = pool._slots[key(39), CPU].number
    assert tensors["protected_columns"][row].tolist() == [3, -1]
    assert not tensors["layers.0.packed.keys"][row, :, 9:].any()


@pytest.mark.parametrize("budget", [0, 100])
def test_a_context_larger_than_the_pool_is_not_kept(budget: int) -> None:
    pool = ContextPool(budget)
    assert not pool.put(key(0), context(60), CPU)
    assert (len(pool), pool.nbytes) == (0, 0)


def test_a_budget_below_zero() -> None:
    with pytest.raises(ValueError, match="a budget must be at least 0 bytes, got -1"):
        ContextPool(-1)


def test_too_little_memory_is_a_full_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA out of memory")

    pool, small = ContextPool(10**6), context(3)
    monkeypatch.setattr(FlatContext, "empty", fail)
    assert not pool.put(key(0), small, CPU)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "hold", "release", "clear"]), st.integers(0, 15), st.integers(1, 300)
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(budget=st.sampled_from([20_000, 100_000, 400_000]), steps=STEPS)
def test_held_contexts_stay_and_little_memory_is_empty(budget: int, steps: list[tuple[str, int, int]]) -> None:
    pool, holds = ContextPool(budget), list[tuple[PoolHold, tuple[str, str], FlatContext, int]]()
    stored: dict[tuple[str, str], FlatContext] = {}
    for number, (what, name, tokens) in enumerate(steps):
        if what == "put":
            # A key stands for one context.
            known = stored.setdefault(key(name), context(tokens, number % 100))
            if pool.put(key(name), known, CPU):
                assert same(pool.get(key(name), CPU), known)
        elif what == "hold":
            hold = pool.hold()
            if hold.add(key(name), CPU):
                slot = pool._slots[key(name), CPU]
                address = slot.slab.tensors["token_ids"][slot.number].data_ptr()
                holds.append((hold, key(name), stored[key(name)], address))
        elif what == "release" and holds:
            holds.pop(name % len(holds))[0].release()
        elif what == "clear":
            pool.clear()
        assert pool.nbytes <= budget
        for _, held, expected, address in holds:
            slot = pool._slots[held, CPU]
            assert slot.slab.tensors["token_ids"][slot.number].data_ptr() == address
            assert same(pool.get(held, CPU), expected)
        if what == "put":
            for kind in {slab.kind for slab in pool._slabs}:
                own = [slab for slab in pool._slabs if slab.kind == kind]
                # Empty slots are in one slab of a kind, unless a slab of another kind went for it.
                assert sum(bool(slab.free) for slab in own) <= 1
                slot_bytes = own[0].nbytes // (len(own[0].free) + len(own[0].slots))
                largest = max(slab.nbytes for slab in own)
                assert largest <= max(budget // 8, slot_bytes)
    info = pool.info()
    assert info["contexts"] == len(pool)
    assert info["held"] == len({held for _, held, _, _ in holds})
    for hold, *_ in holds:
        hold.release()
    pool.clear()
    assert (len(pool), pool.nbytes, pool.info()["held"]) == (0, 0, 0)


def test_memory_follows_the_lengths_that_are_used() -> None:
    """Slabs of one size give way to another that is used now, but not while they are held."""
    pool = ContextPool(60_000)
    short = 0
    while pool.evicted == 0:
        pool.put(key(short), context(60), CPU)
        short += 1
    hold = pool.hold()
    assert hold.add(key(short - 1), CPU)
    longest = [number for number in range(1000, 1030) if pool.put(key(number), context(250), CPU)]
    assert len(longest) == 30
    assert pool.get(key(1029), CPU) is not None
    assert same(pool.get(key(short - 1), CPU), context(60))
    hold.release()


def test_the_last_reference_lets_go() -> None:
    pool = ContextPool(10**6)
    pool.put(key(0), context(9), CPU)
    hold = pool.hold()
    assert hold.add(key(0), CPU)
    assert not hold.add(key(1), CPU)
    assert pool.info()["held"] == 1
    del hold
    gc.collect()
    assert pool.info()["held"] == 0


def test_a_store_holds_contexts_that_are_read_in_place(tiny: TurboEsm, tmp_path: object) -> None:
    """Of several lengths, from the model, from disk and from the pool: as contexts of a cache of their own."""
    sequences = [protein(length, length) for length in (30, 70, 12, 200)]
    expected = tiny.extend(tiny.prefill(sequences), ["GSG", "A", "WW", "KL"]).logits
    for attempt, found in (("computed", "missed"), ("again", "disk")):
        with ContextStore(tmp_path / "store", host_bytes=0) as store:
            for place in (found, "device"):
                before = store.info()["usage"][place]
                with store.hold(tiny, sequences) as contexts:
                    assert contexts.lengths.tolist() == [31, 71, 13, 201]
                    logits = tiny.extend(contexts, ["GSG", "A", "WW", "KL"]).logits
                    named = tiny.extend(contexts, ["WW", "GSG", "A"], context_index=[2, 0, 1]).logits
                    assert store.info()["memory"]["device"]["held"] == 4
                assert store.info()["usage"][place] == before + 4, attempt
                # Contexts that were computed in other batches, and read over other columns.
                assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
                assert (named[1, :4] - expected[0, :4]).abs().max() <= 1e-5 * expected.abs().max()
                assert store.info()["memory"]["device"]["held"] == 0
        with pytest.raises(ValueError, match="the contexts have been released"):
            tiny.extend(contexts, ["GSG", "A", "WW", "KL"])


@pytest.mark.gpu
def test_a_store_on_a_device_holds_contexts_that_are_read_in_place(
    turbo: TurboEsm, tiny_model: MakeModel, tmp_path: object
) -> None:
    """Contexts that come and go on another stream than the one that reads: to 1e-5 of the largest logit, in float32."""
    on_device = TurboEsm(tiny_model(preset=DEFAULT_PRESET).to("cuda"), turbo.tokenizer)
    sequences = [protein(20 + 9 * seed, seed) for seed in range(16)]
    expected = [on_device.extend(on_device.prefill(sequence), "GSGW").logits[0] for sequence in sequences]
    size = FlatContext.of(on_device.prefill(sequences[-1])).nbytes
    store, other = ContextStore(tmp_path / "store", device_bytes=8 * size), torch.cuda.Stream()
    for trial in range(30):
        chosen = random.Random(trial).sample(range(16), 3)
        with torch.cuda.stream(other if trial % 2 else torch.cuda.current_stream()):
            with store.hold(on_device, [sequences[number] for number in chosen]) as contexts:
                found = on_device.extend(contexts, ["GSGW"] * 4, context_index=[1, 0, 2, 1]).logits
            found = found.cpu()
        for row, number in zip(found, (chosen[i] for i in (1, 0, 2, 1)), strict=True):
            theirs = expected[number].cpu()
            assert (row - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert store.info()["memory"]["device"]["evicted"] > 0


def test_a_store_that_is_only_read_holds_contexts_too(tiny: TurboEsm, tmp_path: object) -> None:
    store = ContextStore(tmp_path / "none", read_only=True)
    with store.hold(tiny, [protein(9)]) as contexts:
        assert torch.isfinite(tiny.extend(contexts, ["GSG"]).logits).all()
    assert not (tmp_path / "none").exists()


def test_more_than_the_pool_can_hold(tiny: TurboEsm, tmp_path: object) -> None:
    sequences = [protein(60, seed) for seed in range(8)]
    size = FlatContext.of(tiny.prefill(sequences[0])).nbytes
    store = ContextStore(tmp_path / "store", device_bytes=5 * size)
    with store.hold(tiny, sequences[:2]) as contexts:
        with pytest.raises(NotEnoughMemoryError, match=r"does not fit into `device_bytes` of .* hold fewer at a time"):
            store.hold(tiny, sequences)
        assert store.info()["memory"]["device"]["held"] == 2
        assert torch.isfinite(tiny.extend(contexts, ["GSG", "A"]).logits).all()
    with store.hold(tiny, sequences[4:6]):
        assert store.info()["memory"]["device"]["held"] == 2


def test_contexts_are_not_evicted_while_threads_read_them(tiny: TurboEsm, tmp_path: object) -> None:
    """Threads hold, read and release contexts of a pool that has room for few: every one reads what it asked for."""
    sequences = [protein(20 + 5 * seed, seed) for seed in range(12)]
    store = ContextStore(tmp_path / "store", device_bytes=40 * FlatContext.of(tiny.prefill(sequences[-1])).nbytes // 10)
    store.add(tiny, sequences)
    with torch.no_grad():
        expected = [tiny.extend(tiny.prefill(sequence), "GSGW").logits[0] for sequence in sequences]

    def work(seed: int) -> int:
        choose, full = random.Random(seed), 0
        for _ in range(12):
            chosen = choose.sample(range(12), 2)
            try:
                contexts = store.hold(tiny, [sequences[number] for number in chosen])
            except NotEnoughMemoryError:
                full += 1
                continue
            with contexts:
                found = tiny.extend(contexts, ["GSGW", "GSGW"]).logits
            for row, number in zip(found, chosen, strict=True):
                assert (row - expected[number]).abs().max() <= 1e-5 * expected[number].abs().max()
        return full

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) < 48
    info = store.info()["memory"]["device"]
    assert info["evicted"] > 0
    assert info["held"] == 0
