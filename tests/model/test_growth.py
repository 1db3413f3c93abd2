"""Rows that grow by captured steps, against extensions of a cache that appends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.model.graphs import Caller, GraphPool, growing_rows
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.plan import ForwardInputs
from tests.helpers.graphs import pool_without_cuda
from tests.helpers.models import MASK, make_config, random_ids, rounding

MakeModel = Callable[..., TurboEsmForMaskedLM]
ROUNDING = 2 * rounding(make_config())
TAIL = 4
# A refresh of all but the first tokens, and a step that only adds one.
KINDS = [StepKind(TAIL + 1, TAIL), StepKind(2, 1)]


@pytest.fixture
def captures() -> list[Callable[[], Tensor]]:
    return []


@torch.no_grad()
def contexts(model: TurboEsmForMaskedLM, lengths: list[int], seed: int = 0, gap: int = 0) -> TurboKVCache:
    """Contexts with a mask; with a gap in the positions after three tokens, if one is given."""
    ids, mask = (x.to(model.device) for x in random_ids(lengths, seed=seed, masks=1))
    steps = torch.arange(ids.shape[1], device=model.device)
    positions = (steps + gap * (steps > 2)).expand_as(ids) if gap else None
    return model(ids, mask, positions, use_cache=True).past_key_values


def columns_for(cache: TurboKVCache, steps: int) -> int:
    return int(cache.lengths.max()) + steps + 1


@torch.no_grad()
def eager(model: TurboEsmForMaskedLM, cache: TurboKVCache, coming: Tensor, kinds: list[StepKind]) -> list[Tensor]:
    """The mask's states of every step; the cache grows."""
    found = []
    for step, kind in enumerate(kinds):
        # Tokens of this step that are in the cache, and those that are not.
        again = kind.tokens - 1 if step == 0 else kind.tokens - 2
        tail = cache.lengths[:, None] - again + torch.arange(again, device=model.device)
        ids = cache.token_ids.gather(1, tail).long()
        positions = tail if cache.positions is None else cache.positions.gather(1, tail).long()
        after = cache.next_positions[:, None]
        ids = torch.cat([ids, coming[:, step - 1 : step], torch.full_like(after, MASK)], dim=1)
        positions = torch.cat([positions, *[after + i for i in range(ids.shape[1] - again)]], dim=1)
        cache.crop(cache.lengths - again)
        stored = (torch.arange(ids.shape[1], device=model.device) < ids.shape[1] - 1).expand_as(ids)
        output = model.esm(
            ids,
            position_ids=None if cache.positions is None else positions,
            past_key_values=cache,
            use_cache=True,
            append_mask=stored,
        )
        found.append(output.last_hidden_state[:, -1].clone())
    return found


def load(growth: Growth, cache: TurboKVCache, columns: int) -> None:
    lengths = cache.lengths.cpu()
    positions = None
    if cache.positions is not None:
        after = cache.next_positions.cpu()[:, None] + torch.arange(columns) - lengths[:, None]
        stored = torch.nn.functional.pad(cache.positions.cpu().long(), (0, columns - cache.columns))
        positions = torch.where(torch.arange(columns) < lengths[:, None], stored, after)
    masks = ((cache.token_ids == MASK) & cache.valid()).sum(1).cpu()
    growth.load(cache, cache.token_ids.cpu(), lengths, masks, positions)


def grown(
    pool: GraphPool, model: TurboEsmForMaskedLM, cache: TurboKVCache, coming: Tensor, kinds: list[StepKind]
) -> tuple[list[Tensor], TurboKVCache] | None:
    columns = columns_for(cache, len(kinds))
    with pool.growing(Caller(model.esm.executor, (1,), 2), cache, list(dict.fromkeys(kinds)), columns) as growth:
        if growth is None:
            return None
        load(growth, cache, columns)
        found = []
        for step, kind in enumerate(kinds):
            if step:
                growth.push(coming[:, step - 1])
            found.append(growth.step(kind)[: len(coming)].clone())
        return found, growth.copy(len(coming), int(cache.lengths.max()) + len(kinds) - 1)


def extended(
    pool: GraphPool, model: TurboEsmForMaskedLM, cache: TurboKVCache, ids: Tensor, address: int, uses: int = 1
) -> Tensor | None:
    inputs = ForwardInputs(ids, position_ids=torch.arange(9, 13)[None])
    return pool.extend(Caller(model.esm.executor, (address,), uses), cache, inputs)


def tokens_to_come(rows: int, steps: int, device: torch.device | str = "cpu") -> Tensor:
    return random_ids([steps] * rows, seed=9, cls=False)[0].to(device)


SCHEDULES = {
    "refresh at every third step": [*KINDS, KINDS[1], *KINDS, KINDS[1]],
    "refresh at the first step": [KINDS[0], *[KINDS[1]] * 5],
}


@pytest.mark.parametrize("kinds", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("preset", "gap"), [("exact", 0), ("paper", 7), ("turbo3", 0), ("turbo3", 7)])
@torch.no_grad()
def test_steps_are_those_of_a_cache_that_appends(
    tiny_model: MakeModel, captures: list, preset: str, gap: int, kinds: list[StepKind]
) -> None:
    """For rows of other lengths, and other numbers of rows, in the same graphs."""
    model, pool = tiny_model(preset=preset), pool_without_cuda(captures)
    for seed, lengths in enumerate(([21, 9, 13], [5, 30, 8, 6])):
        cache = contexts(model, lengths, seed, gap)
        coming = tokens_to_come(len(lengths), len(kinds))
        found, copied = grown(pool, model, cache, coming, kinds)
        expected = eager(model, cache, coming, kinds)
        for one, other in zip(found, expected, strict=True):
            # Codes may differ where rounding does, and a code that differs shows.
            tolerance = ROUNDING if preset == "exact" else 2e-2
            assert (one - other).abs().max() <= tolerance * other.abs().max()
        assert torch.equal(copied.lengths, cache.lengths)
        assert torch.equal(copied.token_ids * copied.valid(), cache.token_ids * cache.valid())
        assert (copied.positions is None) == (cache.positions is None)
        if copied.positions is not None:
            assert torch.equal(copied.positions * copied.valid(), cache.positions * cache.valid())
        again = eager(model, copied, coming, kinds)
        for one, other in zip(again, eager(model, cache, coming, kinds), strict=True):
            assert (one - other).abs().max() <= tolerance * other.abs().max()
    assert len(captures) == 2
    assert len(pool) == 1


@torch.no_grad()
def test_a_step_reads_what_earlier_ones_stored(tiny_model: MakeModel, captures: list) -> None:
    """The comparison above could not tell otherwise that keys and values of the right tokens are stored."""
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache, kinds = contexts(model, [9]), [KINDS[1]] * 4
    coming = tokens_to_come(1, 4)
    one, _ = grown(pool, model, cache, coming, kinds)
    other, _ = grown(pool, model, cache, coming.roll(1, 1), kinds)
    assert torch.equal(one[0], other[0])
    assert (one[3] - other[3]).abs().max() > 100 * ROUNDING * one[3].abs().max()


@torch.no_grad()
def test_nothing_is_left_of_an_earlier_call(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(preset="turbo3"), pool_without_cuda(captures)
    short, long = contexts(model, [9], 1), contexts(model, [60, 70, 80], 2)
    kinds, coming = SCHEDULES["refresh at every third step"], tokens_to_come(3, 6)
    # As many rows as the second call needs.
    short = short.select([0, 0, 0])
    first, _ = grown(pool, model, short, coming, kinds)
    grown(pool, model, long, coming, kinds)
    again, _ = grown(pool, model, short, coming, kinds)
    assert len(captures) == 2
    assert all(map(torch.equal, first, again))


@torch.no_grad()
def test_rows_and_columns_have_few_sizes(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    for rows in (5, 8, 7):
        for length in (9, 100):
            cache = contexts(model, [length] * rows)
            assert grown(pool, model, cache, tokens_to_come(rows, 2), [KINDS[1]] * 2) is not None
    assert len(captures) == 1
    found = [growing_rows(rows) for rows in (1, 2, 3, 9, 33, 64, 65)]
    assert found == [1, 2, 4, 16, 48, 64, 96]


@torch.no_grad()
def test_what_does_not_fit_is_not_captured(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [9])
    for columns, kind in ((4097, KINDS[1]), (9, StepKind(16385, 1))):
        with pool.growing(Caller(model.esm.executor, (1,), 2), cache, [kind], columns) as growth:
            assert growth is None
    pool.memory_limit = cache.nbytes
    with pool.growing(Caller(model.esm.executor, (1,), 2), cache, KINDS, 20) as growth:
        assert growth is None
    assert not captures


@torch.no_grad()
def test_a_shape_is_captured_when_it_pays(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [9])
    found = []
    for uses in (0, 1, 0, 1, 0):
        with pool.growing(Caller(model.esm.executor, (1,), uses), cache, KINDS, 20) as growth:
            found.append(growth is not None)
    assert found == [False, False, False, True, True]


@torch.no_grad()
def test_callers_at_the_same_time_have_graphs_of_their_own(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [9])
    arguments = (Caller(model.esm.executor, (1,), 2), cache, KINDS, 20)
    with pool.growing(*arguments) as one:
        # Nor does a graph in use keep other calls from the pool.
        with pool.growing(*arguments) as other:
            assert other is not one
        assert len(pool) == 1
        ids, _ = random_ids([4], cls=False)
        assert extended(pool, model, cache, ids, 1, uses=2) is not None
    assert len(pool) == 2
    with pool.growing(*arguments) as again:
        assert again is other


@torch.no_grad()
def test_a_failed_call_and_moved_parameters(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(), pool_without_cuda(captures)
    cache = contexts(model, [9])
    with pytest.raises(KeyboardInterrupt), pool.growing(Caller(model.esm.executor, (1,), 2), cache, KINDS, 20):
        raise KeyboardInterrupt
    assert len(pool) == 1
    with pool.growing(Caller(model.esm.executor, (1,), 2), cache, KINDS, 20) as growth:
        ids, _ = random_ids([4], cls=False)
        # Parameters move while the graph is in use: it must not come back.
        extended(pool, model, cache, ids, 2)
        assert growth is not None
    assert len(pool) == 0


@pytest.mark.interpreter
@torch.no_grad()
def test_steps_by_kernels(tiny_model: MakeModel, captures: list) -> None:
    model, pool = tiny_model(preset="turbo3", backend="triton"), pool_without_cuda(captures)
    cache, kinds = contexts(model, [12, 6]), KINDS
    coming = tokens_to_come(2, 2)
    found, _ = grown(pool, model, cache, coming, kinds)
    for one, other in zip(found, eager(model, cache, coming, kinds), strict=True):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


# On a device.

ON_DEVICE = {torch.float32: 2e-2, torch.bfloat16: 5e-2, torch.float16: 3e-2}


@pytest.fixture
def on_cuda(tiny_model: MakeModel) -> Callable[..., TurboEsmForMaskedLM]:
    def make(preset: str = "turbo3", dtype: torch.dtype = torch.bfloat16) -> TurboEsmForMaskedLM:
        return tiny_model(preset=preset, layers=4, head_dim=32).to("cuda", dtype)

    return make


@torch.no_grad()
def captured(
    model: TurboEsmForMaskedLM, cache: TurboKVCache, coming: Tensor, kinds: list[StepKind]
) -> list[Tensor] | None:
    """Steps by the model's own graphs; None if it has none."""
    columns = columns_for(cache, len(kinds))
    with model.growing(cache, list(dict.fromkeys(kinds)), columns, 2) as growth:
        if growth is None:
            return None
        load(growth, cache, columns)
        found = []
        for step, kind in enumerate(kinds):
            if step:
                growth.push(coming[:, step - 1])
            found.append(growth.step(kind)[: len(coming)].clone())
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).float().abs().max() <= ON_DEVICE[one.dtype] * other.float().abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "dtype", "gap"),
    [
        ("exact", torch.bfloat16, 0),
        ("paper", torch.float16, 7),
        ("turbo3", torch.bfloat16, 0),
        ("turbo3", torch.float32, 7),
    ],
    ids=str,
)
@torch.no_grad()
def test_replays_equal_eager_steps(on_cuda: MakeModel, preset: str, dtype: torch.dtype, gap: int) -> None:
    model, kinds = on_cuda(preset, dtype), SCHEDULES["refresh at every third step"]
    for seed, lengths in enumerate(([21, 9, 13], [5, 30, 8, 6], [90, 100, 110])):
        cache = contexts(model, lengths, seed, gap)
        coming = tokens_to_come(len(lengths), len(kinds), "cuda")
        found = captured(model, cache, coming, kinds)
        assert_same(found, eager(model, cache, coming, kinds))
    assert len(model.esm.executor.graphs) == 1


@pytest.mark.gpu
@torch.no_grad()
def test_hooks_and_switches_run_eagerly(on_cuda: MakeModel) -> None:
    model, kinds = on_cuda(), [KINDS[1]] * 3
    cache, coming = contexts(model, [30]), tokens_to_come(1, 3, "cuda")
    for module in (model, model.esm, model.esm.encoder.layer[0].output.dense):
        handle = module.register_forward_hook(lambda *_: None)
        assert captured(model, cache, coming, kinds) is None
        handle.remove()
    model.esm.captures = False
    assert captured(model, cache, coming, kinds) is None
    model.esm.captures = True
    with torch.autocast("cuda", torch.bfloat16):
        assert captured(model, cache, coming, kinds) is None
    assert captured(model, cache, coming, kinds) is not None


@pytest.mark.gpu
def test_inference_mode(on_cuda: MakeModel) -> None:
    model, kinds = on_cuda(), [KINDS[1]] * 3
    coming = tokens_to_come(1, 3, "cuda")
    outside = contexts(model, [30])
    with torch.inference_mode():
        inside = contexts(model, [30])
        first = captured(model, inside, coming, kinds)
    second = captured(model, outside, coming, kinds)
    with torch.inference_mode():
        third = captured(model, inside, coming, kinds)
    for one, other in ((first, second), (first, third)):
        assert_same(one, other)
    assert len(model.esm.executor.graphs) == 1


@pytest.mark.gpu
def test_threads_and_streams(on_cuda: MakeModel) -> None:
    """Threads grow rows and extend contexts of their own at the same time, over the graphs of one model."""
    model, kinds = on_cuda(), SCHEDULES["refresh at every third step"]
    cases = []
    for seed in range(3):
        cache = contexts(model, [20 + seed], seed)
        coming = tokens_to_come(1, len(kinds), "cuda")
        cases.append((cache, coming, captured(model, cache, coming, kinds)))
    context = contexts(model, [30])
    ids = random_ids([5], cls=False)[0].cuda()
    with torch.no_grad():
        extended = [model.esm(ids, past_key_values=context).last_hidden_state for _ in range(3)][-1]
    torch.cuda.synchronize()
    errors: list[Exception] = []
    finished: list[int] = []

    def grow(index: int) -> None:
        cache, coming, expected = cases[index]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert_same(captured(model, cache, coming, kinds), expected)
                    finished.append(index)
        except Exception as error:
            errors.append(error)

    def extend() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(100):
                    assert_same([model.esm(ids, past_key_values=context).last_hidden_state], [extended])
                    finished.append(3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=grow, args=(index,)) for index in range(3)]
    threads.append(threading.Thread(target=extend))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(finished) == 160
