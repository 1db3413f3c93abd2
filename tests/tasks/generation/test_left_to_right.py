"""Residues appended step by step, against plain loops over Hugging Face's model and an independent model in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.graphs import pool_without_cuda, stand_in
from tests.helpers.models import CLS, MASK, random_ids
from tests.helpers.plain_generation import (
    ATOL,
    PREFIX,
    assert_same_output,
    by_graphs_and_eagerly,
    full_logits,
    plain_draw,
)

MakeModel = Callable[..., TurboEsmForMaskedLM]


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@pytest.mark.parametrize("temperature", [0, 1.0, 0.3])
def test_refreshing_everything_at_every_step_is_the_plain_model(
    turbo: TurboEsm, tiny_model: MakeModel, hf: EsmForMaskedLM, preset: str, temperature: float
) -> None:
    tiny = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    output = tiny.generate(PREFIX, max_new_tokens=12, temperature=temperature, seed=[5], refresh=1000, refresh_every=1)
    generator = torch.Generator().manual_seed(5)
    ids = tiny.codes.encode(PREFIX, "it")
    expected = []
    for _ in range(12):
        token, log_prob = plain_draw(full_logits(hf, [CLS, *ids, MASK])[-1], temperature, generator)
        ids.append(token)
        expected.append(log_prob)
    assert output.sequences == [tiny.codes.decode(ids)]
    assert output.positions == [list(range(23, 35))]
    torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor([expected]), rtol=0, atol=ATOL)


@pytest.mark.parametrize(("refresh", "every"), [(0, 1), (5, 1), (5, 3), (3, 7), (30, 4)])
def test_every_step_is_the_frozen_computation(
    exact: TurboEsm, tiny_frozen: FrozenEsm2, refresh: int, every: int
) -> None:
    """Given tokens, the logits match those of an independent cache of keys and values."""
    context, coming = random_ids([20], seed=1)[0][0].tolist(), random_ids([15], seed=2, cls=False)[0][0].tolist()
    decoder = LeftToRight(exact, exact.prefill(exact.codes.decode(context[1:])), refresh, every)
    ids = list(context)
    past = tiny_frozen.context(ids).kv
    for step, token in enumerate(coming):
        stored = past[0][0].shape[1]
        if step % every == 0:
            stored = max(min(stored, len(ids) - refresh), 0)
        new = [*ids[stored:], MASK]
        run = tiny_frozen.run(
            new,
            list(range(stored, stored + len(new))),
            total_tokens=len(ids) + 1,
            total_masks=1,
            past=[(k[:, :stored], v[:, :stored]) for k, v in past] if stored else None,
        )
        past = [
            tuple(torch.cat([old[:, :stored], x[:, :-1]], dim=1) for old, x in zip(layer, kv, strict=True))
            for layer, kv in zip(past, run.kv, strict=True)
        ]
        torch.testing.assert_close(decoder.logits()[0].double(), run.logits[-1], rtol=0, atol=ATOL)
        assert decoder.cache.lengths.tolist() == [len(ids)]
        assert decoder.cache.columns == len(ids)
        decoder.push([token])
        ids.append(token)


def test_less_refreshing_is_further_from_the_full_run(exact: TurboEsm, hf: EsmForMaskedLM) -> None:
    """The comparisons above would also pass if every step ran everything again."""
    context, coming = random_ids([40], seed=1)[0][0].tolist(), random_ids([10], seed=2, cls=False)[0][0].tolist()
    errors_by_refresh = {}
    for refresh in (0, 8, 1000):
        decoder = LeftToRight(exact, exact.prefill(exact.codes.decode(context[1:])), refresh, 1)
        errors = []
        for step, token in enumerate(coming):
            expected = full_logits(hf, [*context, *coming[:step], MASK])[-1]
            errors.append((decoder.logits()[0] - expected).square().mean())
            decoder.push([token])
        errors_by_refresh[refresh] = float(torch.stack(errors).mean().sqrt())
    assert errors_by_refresh[1000] < ATOL < 0.02 < errors_by_refresh[8] < errors_by_refresh[0]


def test_only_new_tokens_run(exact: TurboEsm) -> None:
    shapes = []
    hook = exact.model.esm.register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape)), with_kwargs=False
    )
    try:
        exact.generate(PREFIX, max_new_tokens=7, num_return_sequences=3, refresh=6, refresh_every=4)
    finally:
        hook.remove()
    # One context for all samples; steps 0 and 4 run the refreshed residues, including the new ones, and a mask.
    assert shapes == [(1, 23), (3, 7), (3, 2), (3, 2), (3, 2), (3, 7), (3, 2), (3, 2)]


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_the_returned_cache_holds_the_generated_sequences(turbo: TurboEsm, tiny_model: MakeModel, preset: str) -> None:
    tiny = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    output = tiny.generate(
        [PREFIX, "MKT"], max_new_tokens=9, num_return_sequences=2, refresh_every=4, return_cache=True
    )
    cache = output.cache
    assert cache.lengths.tolist() == [32, 32, 13, 13]
    assert cache.columns == cache.get_seq_length() == 32
    for row, sequence in enumerate(output.sequences):
        assert tiny.codes.decode(cache.token_ids[row, 1 : cache.lengths[row]].tolist()) == sequence
        assert sequence.startswith((PREFIX, PREFIX, "MKT", "MKT")[row])
    if cache.config.protect_special_tokens:
        assert cache.protected_columns.tolist() == [[0]] * 4
    assert tiny.extend(cache, ["G"] * 4).logits.isfinite().all()
    assert tiny.generate(PREFIX, max_new_tokens=2).cache is None


def test_a_cache_refreshed_at_the_end_is_that_of_prefill(exact: TurboEsm) -> None:
    output = exact.generate([PREFIX, "MK"], max_new_tokens=9, refresh=100, refresh_every=1, return_cache=True)
    expected = exact.prefill(output.sequences)
    assert output.cache.lengths.tolist() == expected.lengths.tolist()
    for mine, theirs in zip(output.cache.layers, expected.layers, strict=True):
        for name, tensor in theirs.packed.items():
            for row, length in enumerate(expected.lengths.tolist()):
                torch.testing.assert_close(
                    mine.packed[name][row, :, :length], tensor[row, :, :length], rtol=1e-4, atol=1e-4
                )


@torch.no_grad()
def with_a_gap(turbo: TurboEsm) -> tuple[TurboKVCache, list[int]]:
    """A context whose positions have a gap, and these."""
    ids = turbo.codes.encode(PREFIX, "it")
    positions = [0, *range(1, 11), *range(61, 61 + len(ids) - 10)]
    output = turbo.model(torch.tensor([[CLS, *ids]]), position_ids=torch.tensor([positions]), use_cache=True)
    return output.past_key_values, positions


def test_a_gap_in_the_positions_is_kept(exact: TurboEsm, tiny_frozen: FrozenEsm2) -> None:
    """Refreshed residues of a context with a gap keep their positions."""
    cache, positions = with_a_gap(exact)
    ids = exact.codes.encode(PREFIX, "it")
    decoder = LeftToRight(exact, cache, refresh=100, refresh_every=1)
    for token in (7, 8):
        ids.append(token)
        positions.append(positions[-1] + 1)
        decoder.logits()
        decoder.push([token])
    expected = tiny_frozen.run(
        [CLS, *ids, MASK], [*positions, positions[-1] + 1], total_tokens=len(ids) + 2, total_masks=1
    )
    torch.testing.assert_close(decoder.logits()[0].double(), expected.logits[-1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("preset", ["turbo1", "turbo3"])
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_a_short_prefix_does_not_depend_on_its_batch(turbo: TurboEsm, preset: str, refresh_every: int) -> None:
    """A refresh drops all of it from the cache, but only a part of the other row."""
    own = TurboEsm.from_pretrained(preset=preset, device="cpu")
    long = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
    # The residues are given: a draw may fall anywhere between two of them.
    options = {"max_new_tokens": 6, "refresh_every": refresh_every, "allowed": dict(enumerate("GSWKDL", start=5))}
    alone = own.generate("MKTA", **options)
    beside = own.generate(["MKTA", long], **options)
    assert alone.sequences[0] == beside.sequences[0] == "MKTAGSWKDL"
    # Rounding may move a code across a boundary.
    assert torch.allclose(torch.tensor(alone.log_probs[0]), torch.tensor(beside.log_probs[0]), atol=5e-3)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], torch.Tensor]]:
    """Steps are captured as on CUDA, see `stand_in`, while `captures` is set."""
    return stand_in(monkeypatch)


def given(lengths: list[int], count: int) -> dict[int, str]:
    """One residue for each position after rows of these lengths: a draw may fall anywhere between two of them."""
    return {position: "GSWKDLAE"[position % 8] for n in lengths for position in range(n + 1, n + count + 1)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"refresh": 0},
        {"refresh": 1, "refresh_every": 2},
        {"refresh": 5, "refresh_every": 3, "num_return_sequences": 3},
        {"refresh": 3, "top_p": 0.9, "top_k": 5, "temperature": 1.7},
        {"temperature": 0, "banned": "LA"},
        {"allowed": {24: "AG", 5: "W", 15: "LV"}, "refresh": 3},
    ],
    ids=str,
)
def test_captured_steps_draw_what_eager_ones_draw(
    turbo: TurboEsm, tiny_model: MakeModel, captures: list, options: dict[str, object]
) -> None:
    tiny = TurboEsm(tiny_model(), turbo.tokenizer)
    # Beside a row that is too short for its refresh at first, and one with a mask.
    sequences = [PREFIX, "MKTA", "MK<mask>GGGSGS"]
    graphs, eager = by_graphs_and_eagerly(tiny, sequences, max_new_tokens=12, seed=3, **options)
    assert captures
    assert_same_output(graphs, eager, ATOL)


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@pytest.mark.parametrize("refresh_every", [1, 4])
def test_the_cache_after_captured_steps(
    turbo: TurboEsm, tiny_model: MakeModel, captures: list, preset: str, refresh_every: int
) -> None:
    tiny = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    sequences = [PREFIX, "MKTAYIAKQR"]
    options = {"max_new_tokens": 10, "refresh_every": refresh_every, "return_cache": True}
    graphs, eager = by_graphs_and_eagerly(tiny, sequences, allowed=given([22, 10], 10), **options)
    assert captures
    # Rounding may move a code across a boundary.
    assert_same_output(graphs, eager, ATOL if preset == "exact" else 2e-2)
    mine, theirs = graphs.cache, eager.cache
    assert type(mine) is type(theirs)
    assert mine.lengths.tolist() == theirs.lengths.tolist()
    assert mine.columns == theirs.columns
    assert torch.equal(mine.token_ids * mine.valid(), theirs.token_ids * theirs.valid())
    assert torch.equal(mine.protected_columns, theirs.protected_columns)
    found, expected = (tiny.extend(cache, ["GAV", "L"]).logits for cache in (mine, theirs))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=ATOL if preset == "exact" else 2e-1)


def test_captured_steps_keep_a_gap_in_the_positions(
    exact: TurboEsm, captures: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact.model.esm.executor, "graphs", pool_without_cuda(captures))
    cache, positions = with_a_gap(exact)
    graphs, eager = by_graphs_and_eagerly(exact, cache, max_new_tokens=8, refresh_every=2, return_cache=True)
    assert captures
    assert_same_output(graphs, eager, ATOL)
    assert graphs.cache.positions.tolist() == eager.cache.positions.tolist() == [[*positions, *range(73, 81)]]


def test_logits_of_captured_steps_that_are_not_finite(turbo: TurboEsm, tiny_model: MakeModel, captures: list) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.bias[5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        TurboEsm(model, turbo.tokenizer).generate(PREFIX, max_new_tokens=9)
    assert captures


def test_few_tokens_are_not_worth_a_capture(turbo: TurboEsm, tiny_model: MakeModel, captures: list) -> None:
    tiny = TurboEsm(tiny_model(), turbo.tokenizer)
    for _ in range(5):
        tiny.generate(PREFIX, max_new_tokens=3)
    assert not captures
    # A refresh of whole rows has no cache to read.
    tiny.generate(PREFIX, max_new_tokens=20, refresh=1000)
    assert not captures
    tiny.generate(PREFIX, max_new_tokens=8)
    assert len(captures) == 1


# On a device.


def on_cuda(turbo: TurboEsm, tiny_model: MakeModel, preset: str, dtype: torch.dtype) -> TurboEsm:
    return TurboEsm(tiny_model(preset=preset, layers=4, head_dim=32).to("cuda", dtype), turbo.tokenizer)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "dtype", "atol"),
    [
        ("exact", torch.float32, ATOL),
        ("turbo3", torch.float32, 5e-2),
        ("turbo3", torch.bfloat16, 0.5),
        ("paper", torch.float16, 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"refresh": 0}, {"refresh": 5, "refresh_every": 3}], ids=str)
def test_replayed_steps_are_eager_ones(
    turbo: TurboEsm, tiny_model: MakeModel, preset: str, dtype: torch.dtype, atol: float, options: dict[str, int]
) -> None:
    cuda = on_cuda(turbo, tiny_model, preset, dtype)
    for sequences, lengths in ((PREFIX, [22]), ([PREFIX, "MKTA", "MK<mask>GGGSGS"], [22, 4, 9]), (PREFIX[:20], [20])):
        allowed = given(lengths, 12)
        graphs, eager = by_graphs_and_eagerly(cuda, sequences, max_new_tokens=12, allowed=allowed, **options)
        assert_same_output(graphs, eager, atol)
    assert len(cuda.model.esm.executor.graphs) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_p": 0.9, "temperature": 1.7}], ids=str)
def test_a_seed_draws_the_same_by_graphs(turbo: TurboEsm, tiny_model: MakeModel, options: dict[str, float]) -> None:
    cuda = on_cuda(turbo, tiny_model, "exact", torch.float32)
    graphs, eager = by_graphs_and_eagerly(
        cuda, [PREFIX, "MKTA"], max_new_tokens=20, num_return_sequences=3, return_cache=True, seed=7, **options
    )
    assert_same_output(graphs, eager, ATOL)
    assert graphs.cache.lengths.tolist() == eager.cache.lengths.tolist() == [43] * 3 + [25] * 3
    found, expected = (cuda.extend(output.cache, ["G"] * 6).logits for output in (graphs, eager))
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
