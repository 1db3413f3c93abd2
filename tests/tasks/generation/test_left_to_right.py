"""Residues appended step by step, against plain loops over Hugging Face's model and an independent model in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, MASK, random_ids
from tests.helpers.plain_generation import ATOL, PREFIX, full_logits, plain_draw

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


def test_a_gap_in_the_positions_is_kept(exact: TurboEsm, tiny_frozen: FrozenEsm2) -> None:
    """Refreshed residues of a context with a gap keep their positions."""
    ids = exact.codes.encode(PREFIX, "it")
    positions = [0, *range(1, 11), *range(61, 61 + len(ids) - 10)]
    with torch.no_grad():
        cache = exact.model(
            torch.tensor([[CLS, *ids]]), position_ids=torch.tensor([positions]), use_cache=True
        ).past_key_values
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
