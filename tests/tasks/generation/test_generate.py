"""Generation against plain loops over Hugging Face's model and over an independent model in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.proteins.fasta import RESIDUES
from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.generation.generate import GenerationOptions
from esm_turbo.tasks.generation.left_to_right import LeftToRight
from esm_turbo.tasks.generation.sampling import STANDARD_RESIDUES, AllowedResidues, ResidueSampler, Sampling, row_seeds
from esm_turbo.tasks.generation.unmasking import MaskedBatch
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK, make_esm, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]
PREFIX = "MKTAYIAKQRQISFVKSHFSRQ"
STANDARD = list(range(4, 24))
# Logits of the tiny model are of order ten; float32 over two layers.
ATOL = 1e-3


@pytest.fixture(scope="module")
def hf() -> EsmForMaskedLM:
    return make_esm()


@pytest.fixture
def exact(turbo: TurboEsm, tiny_model: MakeModel) -> TurboEsm:
    return TurboEsm(tiny_model(), turbo.tokenizer)


@pytest.fixture(scope="module")
def frozen(hf: EsmForMaskedLM, tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> FrozenEsm2:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    return FrozenEsm2(folder)


@torch.no_grad()
def full_logits(hf: EsmForMaskedLM, ids: Sequence[int]) -> Tensor:
    """[n, vocabulary]."""
    return hf(torch.tensor([list(ids)])).logits[0]


def plain_draw(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """A standard residue, and its log-probability among all tokens."""
    log_probs = logits.log_softmax(-1)
    if temperature == 0:
        token = max(STANDARD, key=lambda i: float(logits[i]))
    else:
        weights = torch.zeros(33)
        weights[STANDARD] = (logits[STANDARD] / temperature).softmax(-1)
        token = int(torch.multinomial(weights, 1, generator=generator))
    return token, float(log_probs[token])


# ---------------------------------------------------------------- left to right


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
@pytest.mark.parametrize("temperature", [0, 1.0, 0.3])
def test_refreshing_everything_is_the_model_run_anew_every_step(
    turbo: TurboEsm, tiny_model: MakeModel, hf: EsmForMaskedLM, preset: str, temperature: float
) -> None:
    tiny = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    found = tiny.generate(PREFIX, max_new_tokens=12, temperature=temperature, seed=[5], refresh=1000, refresh_every=1)
    generator = torch.Generator().manual_seed(5)
    ids = tiny.codes.encode(PREFIX, "it")
    expected = []
    for _ in range(12):
        token, log_prob = plain_draw(full_logits(hf, [CLS, *ids, MASK])[-1], temperature, generator)
        ids.append(token)
        expected.append(log_prob)
    assert found.sequences == [tiny.codes.decode(ids)]
    assert found.positions == [list(range(23, 35))]
    torch.testing.assert_close(torch.tensor(found.log_probs), torch.tensor([expected]), rtol=0, atol=ATOL)


@pytest.mark.parametrize(("refresh", "every"), [(0, 1), (5, 1), (5, 3), (3, 7), (30, 4)])
def test_every_step_is_the_frozen_computation(exact: TurboEsm, frozen: FrozenEsm2, refresh: int, every: int) -> None:
    """Tokens given, logits compared: against an independent cache of keys and values."""
    context, coming = random_ids([20], seed=1)[0][0].tolist(), random_ids([15], seed=2, cls=False)[0][0].tolist()
    decoder = LeftToRight(exact, exact.prefill(exact.codes.decode(context[1:])), refresh, every)
    ids = list(context)
    past = frozen.context(ids).kv
    for step, token in enumerate(coming):
        stored = past[0][0].shape[1]
        if step % every == 0:
            stored = max(min(stored, len(ids) - refresh), 0)
        new = [*ids[stored:], MASK]
        run = frozen.run(
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
    """The comparisons above would not see it if everything were always computed anew."""
    context, coming = random_ids([40], seed=1)[0][0].tolist(), random_ids([10], seed=2, cls=False)[0][0].tolist()
    off = {}
    for refresh in (0, 8, 1000):
        decoder = LeftToRight(exact, exact.prefill(exact.codes.decode(context[1:])), refresh, 1)
        errors = []
        for step, token in enumerate(coming):
            expected = full_logits(hf, [*context, *coming[:step], MASK])[-1]
            errors.append((decoder.logits()[0] - expected).square().mean())
            decoder.push([token])
        off[refresh] = float(torch.stack(errors).mean().sqrt())
    assert off[1000] < ATOL < 0.02 < off[8] < off[0]


def test_only_new_tokens_run(exact: TurboEsm) -> None:
    shapes = []
    hook = exact.model.esm.register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape)), with_kwargs=False
    )
    try:
        exact.generate(PREFIX, max_new_tokens=7, num_return_sequences=3, refresh=6, refresh_every=4)
    finally:
        hook.remove()
    # One context for all samples; at steps 0 and 4 the refreshed residues, the last of which are new, and a mask.
    assert shapes == [(1, 23), (3, 7), (3, 2), (3, 2), (3, 2), (3, 7), (3, 2), (3, 2)]


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_the_cache_that_comes_back(turbo: TurboEsm, tiny_model: MakeModel, preset: str) -> None:
    tiny = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    found = tiny.generate([PREFIX, "MKT"], max_new_tokens=9, num_return_sequences=2, refresh_every=4, return_cache=True)
    cache = found.cache
    assert cache.lengths.tolist() == [32, 32, 13, 13]
    assert cache.columns == cache.get_seq_length() == 32
    for row, sequence in enumerate(found.sequences):
        assert tiny.codes.decode(cache.token_ids[row, 1 : cache.lengths[row]].tolist()) == sequence
        assert sequence.startswith((PREFIX, PREFIX, "MKT", "MKT")[row])
    if cache.config.protect_special_tokens:
        assert cache.protected_columns.tolist() == [[0]] * 4
    assert tiny.extend(cache, ["G"] * 4).logits.isfinite().all()
    assert tiny.generate(PREFIX, max_new_tokens=2).cache is None


def test_a_cache_refreshed_to_the_end_is_that_of_prefill(exact: TurboEsm) -> None:
    found = exact.generate([PREFIX, "MK"], max_new_tokens=9, refresh=100, refresh_every=1, return_cache=True)
    expected = exact.prefill(found.sequences)
    assert found.cache.lengths.tolist() == expected.lengths.tolist()
    for mine, theirs in zip(found.cache.layers, expected.layers, strict=True):
        for name, tensor in theirs.packed.items():
            for row, length in enumerate(expected.lengths.tolist()):
                torch.testing.assert_close(
                    mine.packed[name][row, :, :length], tensor[row, :, :length], rtol=1e-4, atol=1e-4
                )


def test_from_a_cache(exact: TurboEsm) -> None:
    cache = exact.prefill([PREFIX, "MKT"])
    before = [{name: x.clone() for name, x in layer.packed.items()} for layer in cache.layers]
    options = {"max_new_tokens": 6, "num_return_sequences": 2, "seed": 4, "refresh": 8, "refresh_every": 2}
    found, expected = exact.generate(cache, **options), exact.generate([PREFIX, "MKT"], **options)
    assert found.sequences == expected.sequences
    assert cache.lengths.tolist() == [23, 4]
    for layer, old in zip(cache.layers, before, strict=True):
        assert all(torch.equal(layer.packed[name], x) for name, x in old.items())


def test_from_a_cache_with_positions_of_its_own(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """A context with a gap in it: refreshed residues keep their positions."""
    ids = exact.codes.encode(PREFIX, "it")
    places = [0, *range(1, 11), *range(61, 61 + len(ids) - 10)]
    with torch.no_grad():
        cache = exact.model(
            torch.tensor([[CLS, *ids]]), position_ids=torch.tensor([places]), use_cache=True
        ).past_key_values
    decoder = LeftToRight(exact, cache, refresh=100, refresh_every=1)
    for token in (7, 8):
        ids.append(token)
        places.append(places[-1] + 1)
        decoder.logits()
        decoder.push([token])
    expected = frozen.run([CLS, *ids, MASK], [*places, places[-1] + 1], total_tokens=len(ids) + 2, total_masks=1)
    torch.testing.assert_close(decoder.logits()[0].double(), expected.logits[-1], rtol=0, atol=ATOL)


# ---------------------------------------------------------------- in place of masks


@pytest.mark.parametrize("order", ["left_to_right", "random", "confidence"])
@pytest.mark.parametrize(("per_step", "sweeps"), [(1, 1), (2, 1), (1, 2), (3, 3)])
def test_unmasking_is_the_model_run_anew_every_step(
    exact: TurboEsm, hf: EsmForMaskedLM, order: str, per_step: int, sweeps: int
) -> None:
    chosen = [3, 4, 9, 20, 22]
    found = exact.generate(
        PREFIX, positions=chosen, order=order, per_step=per_step, sweeps=sweeps, seed=[11], refresh_every=1
    )
    generator = torch.Generator().manual_seed(11)
    ids = [CLS, *exact.codes.encode(PREFIX, "it"), EOS]
    for column in chosen:
        ids[column] = MASK
    last: dict[int, float] = {}
    for sweep in range(sweeps):
        left = list(chosen)
        if order == "random":
            left = [chosen[i] for i in torch.randperm(5, generator=generator).tolist()]
        elif order == "confidence" and sweep:
            left.sort(key=lambda column: last[column])
        while left:
            if order == "confidence" and not sweep:
                logits = full_logits(hf, ids)
                left.sort(key=lambda column: -float(logits[column, STANDARD].softmax(-1).max()))
            now, left = left[:per_step], left[per_step:]
            for column in now:
                ids[column] = MASK
            logits = full_logits(hf, ids)
            for column in now if order == "confidence" and not sweep else sorted(now):
                ids[column], last[column] = plain_draw(logits[column], 1.0, generator)
    assert found.sequences == [exact.codes.decode(ids[1:-1])]
    assert found.positions == [chosen]
    expected = torch.tensor([[last[column] for column in chosen]])
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("refresh", [0, 2, 50])
def test_a_step_against_the_cache_is_the_frozen_computation(exact: TurboEsm, frozen: FrozenEsm2, refresh: int) -> None:
    rows = [random_ids([30], seed=1, eos=True)[0][0].tolist(), random_ids([12], seed=2, eos=True)[0][0].tolist()]
    chosen = [[4, 5, 20], [9]]
    for row, columns in zip(rows, chosen, strict=True):
        for column in columns:
            row[column] = MASK
    batch = MaskedBatch(exact, rows, chosen, refresh, 100)
    contexts = [list(row) for row in batch.rows]
    batch.logits()
    for column, token in ((5, 7), (20, 11)):
        batch.rows[0][column] = token
        found = batch.logits()
        for row, columns in enumerate(chosen):
            running = sorted(
                {c + k for c in columns for k in range(-refresh, refresh + 1)} & set(range(1, len(rows[row]) - 1))
            )
            expected = frozen.extend(
                contexts[row],
                frozen.context(contexts[row]),
                [batch.rows[row][c] for c in running],
                positions=running,
                hidden=tuple(running),
            ).logits[[running.index(c) for c in columns]]
            torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=ATOL)


def test_how_much_runs_at_a_step(exact: TurboEsm) -> None:
    shapes = []
    hook = exact.model.esm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    try:
        exact.generate(
            PREFIX, positions=[5, 6, 15], num_return_sequences=4, refresh=1, refresh_every=2, order="left_to_right"
        )
    finally:
        hook.remove()
    # The start is computed once for all samples; two chosen beside each other have two neighbours, the third its own.
    assert shapes == [(1, 24), (4, 7), (4, 24)]


def test_only_what_was_chosen_changes(turbo: TurboEsm) -> None:
    found = turbo.generate("MK<mask>AYIA<mask>QR", num_return_sequences=3)
    assert found.positions == [[3, 8]] * 3
    for sequence in found.sequences:
        assert (sequence[:2], sequence[3:7], sequence[8:]) == ("MK", "AYIA", "QR")
        assert {sequence[2], sequence[7]} <= set(STANDARD_RESIDUES)
    found = turbo.generate("MK<mask>AY", positions=[5])
    assert found.sequences[0].startswith("MK<mask>A")
    found = turbo.generate(["MKTAY", "GAVL"], positions=[[1], [2, 4]])
    assert (found.sequences[0][1:], found.sequences[1][0], found.sequences[1][2]) == ("KTAY", "G", "V")


# ---------------------------------------------------------------- rows, seeds, devices


@pytest.mark.parametrize("options", [{"max_new_tokens": 10}, {"sweeps": 2}, {"order": "confidence", "per_step": 2}])
def test_rows_do_not_depend_on_each_other(exact: TurboEsm, options: dict[str, object]) -> None:
    sequences = [PREFIX + "<mask>A<mask>", "M<mask>", "<mask>GSGSWKDLAEGS<mask><mask>A"]
    options = options | {"refresh": 4, "refresh_every": 3}
    together = exact.generate(sequences, seed=[1, 2, 3], **options)
    for row, sequence in enumerate(sequences):
        alone = exact.generate(sequence, seed=[row + 1], **options)
        assert alone.sequences == [together.sequences[row]]
        assert alone.positions == [together.positions[row]]
        torch.testing.assert_close(
            torch.tensor(alone.log_probs[0]), torch.tensor(together.log_probs[row]), rtol=0, atol=ATOL
        )


@pytest.mark.parametrize("options", [{"max_new_tokens": 12}, {"positions": list(range(2, 14))}])
def test_a_seed_decides(exact: TurboEsm, options: dict[str, object]) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = exact.generate(PREFIX, num_return_sequences=3, seed=7, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = exact.generate(PREFIX, num_return_sequences=3, seed=7, **options)
    assert first == again
    assert len(set(first.sequences)) == 3
    other = exact.generate(PREFIX, num_return_sequences=3, seed=8, **options)
    assert not set(first.sequences) & set(other.sequences)
    # Samples of one seed are no samples of another, and the first ones stay when there are more.
    more = exact.generate(PREFIX, num_return_sequences=5, seed=7, **options)
    assert more.sequences[:3] == first.sequences


def test_seeds_of_rows() -> None:
    seeds = [one for seed in range(50) for one in row_seeds(seed, 50)]
    assert len(set(seeds)) == 2500
    assert row_seeds(3, 7)[:4] == row_seeds(3, 4)
    assert row_seeds(3, 0) == []
    # A row's own seed makes it again where it is alone; what is too large for a generator is no row's.
    assert [row_seeds(seed, 1) for seed in row_seeds(3, 4)] == [[seed] for seed in row_seeds(3, 4)]
    assert all(0 <= seed < 2**63 for seed in row_seeds(2**70, 3))
    assert row_seeds((5, 6), 2) == [5, 6]
    for wrong in (-1, True, 1.5, [1], [1, 2, 3], [1, -2], "ab", None):
        with pytest.raises(ValueError, match="`seed` must be an integer of at least 0, or one for each of the 2 rows"):
            row_seeds(wrong, 2)


def test_draws_have_the_distribution(turbo: TurboEsm) -> None:
    logits = torch.randn(33, generator=torch.Generator().manual_seed(0)).repeat(20_000, 1) * 2
    sampler = ResidueSampler(Sampling(temperature=1.5), AllowedResidues(turbo.codes, 33), [0])
    tokens, log_probs = sampler.draw(logits, [0] * 20_000, [1] * 20_000)
    expected = (logits[0, STANDARD] / 1.5).softmax(0).numpy()
    counts = np.bincount(tokens, minlength=33)
    assert counts.sum() == counts[STANDARD].sum() == 20_000
    # Chi-squared with 19 degrees of freedom exceeds 44 once in a thousand times.
    assert ((counts[STANDARD] - 20_000 * expected) ** 2 / (20_000 * expected)).sum() < 44
    torch.testing.assert_close(torch.tensor(log_probs), logits[0].log_softmax(0)[torch.tensor(tokens)])


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(1e-6)])
def test_the_likeliest(turbo: TurboEsm, sampling: Sampling) -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    sampler = ResidueSampler(sampling, AllowedResidues(turbo.codes, 33), [0])
    tokens, _ = sampler.draw(logits, [0] * 50, [1] * 50)
    assert tokens == (logits[:, STANDARD].argmax(1) + 4).tolist()


def test_cuts_come_after_constraints(turbo: TurboEsm) -> None:
    """The two likeliest of the allowed residues, not the allowed ones of the two likeliest."""
    logits = torch.arange(33.0).repeat(200, 1) / 10
    sampler = ResidueSampler(Sampling(top_k=2), AllowedResidues(turbo.codes, 33, "LAGVS"), [0])
    tokens, _ = sampler.draw(logits, [0] * 200, [1] * 200)
    assert set(tokens) == {7, 8}


# ---------------------------------------------------------------- constraints


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_else_is_ever_generated(turbo: TurboEsm, tiny_model: MakeModel, data: st.DataObject) -> None:
    tiny = TurboEsm(tiny_model(), turbo.tokenizer)
    letters = st.sets(st.sampled_from(RESIDUES), min_size=2)
    everywhere = data.draw(st.none() | letters)
    by_position = data.draw(st.dictionaries(st.integers(23, 30), letters, max_size=3)) if everywhere is None else {}
    banned = data.draw(st.sampled_from([*RESIDUES, ""]))
    allowed = "".join(everywhere) if everywhere else {position: "".join(x) for position, x in by_position.items()}
    options = {"allowed": allowed, "banned": banned, "seed": data.draw(st.integers(0, 9))}
    for sequence, more in ((PREFIX, {"max_new_tokens": 8}), (PREFIX + "<mask>" * 8, {})):
        [found] = tiny.generate(sequence, **options, **more).sequences
        assert found.startswith(PREFIX)
        assert len(found) == 30
        for position, letter in enumerate(found[22:], start=23):
            assert letter in (everywhere or by_position.get(position, set(STANDARD_RESIDUES)))
            assert letter != banned


@pytest.mark.parametrize("token", [CLS, EOS, MASK, 1, 3, 24, 31])
def test_special_tokens_never_come(turbo: TurboEsm, tiny_model: MakeModel, token: int) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.bias[token] = 1e4
    tiny = TurboEsm(model, turbo.tokenizer)
    for temperature in (0, 1.0, 100.0):
        [found] = tiny.generate(PREFIX, max_new_tokens=8, temperature=temperature).sequences
        assert set(found[22:]) <= set(STANDARD_RESIDUES)
        assert len(found) == 30


def test_lower_case_constraints(exact: TurboEsm) -> None:
    [found] = exact.generate(PREFIX, max_new_tokens=8, allowed="ac", banned="c").sequences
    assert found == PREFIX + "A" * 8


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sequence 1: nothing to generate: it has no <mask>"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "got 2.0"),
        ({"max_new_tokens": 2, "order": "random"}, "do not go with `max_new_tokens`"),
        ({"max_new_tokens": 2, "positions": [1]}, "do not go with `max_new_tokens`"),
        ({"max_new_tokens": 2, "sweeps": 2}, "do not go with `max_new_tokens`"),
        ({"positions": [1], "return_cache": True}, "`return_cache` goes with `max_new_tokens` only"),
        ({"positions": [0]}, "sequence 1: its positions are 1 to 5, got 0"),
        ({"positions": [1, 6]}, "sequence 1: its positions are 1 to 5, got 6"),
        ({"positions": [True]}, "got True"),
        ({"positions": []}, "sequence 1: `positions` names none"),
        ({"positions": [[1], [2]]}, "`positions` must be one list, or one for each of the 1 sequences, got 2"),
        ({"positions": [1], "order": "backwards"}, "`order` must be one of .*'random'.*, got 'backwards'"),
        ({"positions": [1], "per_step": 0}, "`per_step` must be an integer of at least 1, got 0"),
        ({"positions": [1], "sweeps": None}, "`sweeps` must be an integer of at least 1, got None"),
        ({"max_new_tokens": 1, "num_return_sequences": 0}, "`num_return_sequences` must be"),
        ({"max_new_tokens": 1, "temperature": -1}, "`temperature` must be from 1e-06 to 1000000, or 0 .*, got -1"),
        ({"max_new_tokens": 1, "temperature": 1e39}, "got 1e[+]39"),
        ({"max_new_tokens": 1, "temperature": "1"}, "got '1'"),
        ({"max_new_tokens": 1, "temperature": None}, "got None"),
        ({"max_new_tokens": 1, "top_p": "a"}, "got 'a'"),
        ({"max_new_tokens": 1, "allowed": ["A"]}, r"`allowed` must be residues, or residues by position, got \['A'\]"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "got nan"),
        ({"max_new_tokens": 1, "temperature": 1e-45}, "or 0 for the likeliest residue, got 1e-45"),
        ({"max_new_tokens": 1, "top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 1, "top_p": 0}, "`top_p` must be above 0 and at most 1, got 0"),
        ({"max_new_tokens": 1, "top_p": 1.5}, "got 1.5"),
        ({"max_new_tokens": 1, "refresh": -1}, "`refresh` must be an integer of at least 0, got -1"),
        ({"max_new_tokens": 1, "refresh_every": 0}, "`refresh_every` must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 1, "seed": [1, 2]}, "one for each of the 1 rows"),
        ({"max_new_tokens": 1, "allowed": "AJ"}, "`allowed` holds 'J', which is no residue code"),
        ({"max_new_tokens": 1, "allowed": {6: "A-"}}, r"`allowed\[6\]` holds '-'"),
        ({"max_new_tokens": 1, "allowed": {0: "A"}}, r"`allowed\[0\]`: positions are integers counted from 1"),
        ({"max_new_tokens": 1, "allowed": {7: "A"}}, "`allowed` names position 7, where nothing is generated"),
        ({"positions": [2], "allowed": {3: "A"}}, "`allowed` names position 3, where nothing is generated"),
        ({"max_new_tokens": 1, "allowed": "A", "banned": "A"}, "no residue may stand anywhere"),
        ({"max_new_tokens": 1, "allowed": {6: "C"}, "banned": "C"}, "no residue may stand at position 6"),
        ({"max_new_tokens": 1, "allowed": ""}, "no residue may stand anywhere"),
        ({"max_new_tokens": 1, "banned": ["<eos>"]}, "`banned` must be a string of residue letters"),
    ],
)
def test_wrong_options(exact: TurboEsm, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact.generate("MKTAY", **options)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        (["MKT", ""], "sequence 2: holds no residues"),
        (["MKT", "MK-T"], "sequence 2: position 3 is '-'"),
    ],
)
def test_bad_sequences(exact: TurboEsm, sequences: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact.generate(sequences, max_new_tokens=2)


def test_unknown_options(exact: TurboEsm) -> None:
    with pytest.raises(TypeError, match="max_length"):
        exact.generate("MKTAY", max_length=7)
    assert GenerationOptions(max_new_tokens=3).sampling == Sampling()


@torch.no_grad()
def test_bad_caches(turbo: TurboEsm, tiny_model: MakeModel, exact: TurboEsm, tmp_path: Path) -> None:
    whole = exact.model(*random_ids([9], eos=True), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="row 1 of the cache is no context of <cls> and residues without <eos>"):
        exact.generate(whole, max_new_tokens=2)
    with pytest.raises(ValueError, match="the cache is empty"):
        exact.generate(exact.model.new_cache(), max_new_tokens=2)
    with pytest.raises(ValueError, match="a cache can only be appended to"):
        exact.generate(exact.prefill("MK<mask>"))
    with pytest.raises(ValueError, match="belongs to another model"):
        exact.generate(TurboEsm(tiny_model(seed=1), turbo.tokenizer).prefill("MKT"), max_new_tokens=2)
    model = tiny_model()
    model.set_turbo(preset="turbo3")
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        TurboEsm(model, turbo.tokenizer).generate("MKT", max_new_tokens=2)


def test_logits_that_are_not_finite(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.bias[5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        TurboEsm(model, turbo.tokenizer).generate("MKT", max_new_tokens=2)


def test_growing_beyond_training_warns(exact: TurboEsm) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact.generate("A" * 1020, max_new_tokens=2)
    with pytest.warns(LongProteinWarning, match="of up to 1023 residues"):
        exact.generate("A" * 1020, max_new_tokens=3)


# ---------------------------------------------------------------- what else runs


def test_cropping_every_row_to_its_own(tiny_model: MakeModel) -> None:
    with torch.no_grad():
        cache = tiny_model(preset="turbo3")(*random_ids([12, 7, 9]), use_cache=True).past_key_values
    cache.crop(torch.tensor([10, 9, -4]))
    assert cache.lengths.tolist() == [10, 7, 5]
    assert cache.columns == 10
    assert cache.protected_columns.tolist() == [[0], [0], [0]]
    cache.crop(torch.tensor([3, -9, 0]))
    assert cache.lengths.tolist() == [3, 0, 0]
    assert cache.protected_columns.tolist() == [[0], [-1], [-1]]


def test_half_precision(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    half = TurboEsm(tiny_model().bfloat16(), turbo.tokenizer)
    found = half.generate([PREFIX, "MK"], max_new_tokens=4)
    assert [len(sequence) for sequence in found.sequences] == [26, 6]


def test_generation_keeps_the_rules_of_mps(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    from tests.test_mps_rules import MpsRules

    model = tiny_model(preset="turbo3", attn_implementation="eager")
    model.esm.calibration.fit(["turbo3"])
    tiny = TurboEsm(model, turbo.tokenizer)
    with MpsRules() as rules:
        tiny.generate(["MKTAYIAKQRQ", "GAV"], max_new_tokens=3, refresh=4, refresh_every=2, top_p=0.9)
        tiny.generate(["MKTAYIAKQRQ", "GAV<mask>L"], positions=[2], sweeps=2)
        tiny.embed("MKTAYIAKQRQISFVKSHFSRQ" * 4, window=20, memory=30)
    assert "multinomial" in rules.operations


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "turbo3"])
def test_on_a_device(turbo: TurboEsm, tiny_model: MakeModel, preset: str) -> None:
    host = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    device = TurboEsm(tiny_model(preset=preset).to("cuda"), turbo.tokenizer)
    # The likeliest residue hangs on no draw, and rows of several lengths on every way of counting columns.
    for sequences, options in (
        ([PREFIX, "MK"], {"max_new_tokens": 20, "refresh": 5, "refresh_every": 2, "return_cache": True}),
        ([PREFIX, "MKTAY"], {"positions": [2, 3, 5], "order": "confidence", "sweeps": 2, "refresh_every": 2}),
    ):
        expected = host.generate(sequences, temperature=0, **options)
        found = device.generate(sequences, temperature=0, **options)
        torch.testing.assert_close(torch.tensor(found.log_probs), torch.tensor(expected.log_probs), rtol=0, atol=0.05)
        if found.cache is not None:
            assert found.cache.device.type == "cuda"
            assert found.cache.lengths.tolist() == expected.cache.lengths.tolist()
            assert found.cache.columns == expected.cache.columns
        # What is drawn does not depend on the device's own generator.
        torch.cuda.manual_seed(1)
        first = device.generate(sequences, seed=3, **options).sequences
        torch.cuda.manual_seed(2)
        assert device.generate(sequences, seed=3, **options).sequences == first


@pytest.mark.parametrize("preset", ["turbo1", "turbo3"])
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_a_short_prefix_does_not_depend_on_its_batch(turbo: TurboEsm, preset: str, refresh_every: int) -> None:
    """All of it is taken off the cache at a refresh, while more of the other rows stays."""
    own = TurboEsm.from_pretrained(preset=preset, device="cpu")
    long = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
    alone = own.generate("MKTA", max_new_tokens=6, seed=[3], refresh_every=refresh_every)
    beside = own.generate(["MKTA", long], max_new_tokens=6, seed=[3, 4], refresh_every=refresh_every)
    assert alone.sequences[0] == beside.sequences[0]
    # A code that rounding puts on the other side of a boundary is let pass.
    assert torch.allclose(torch.tensor(alone.log_probs[0]), torch.tensor(beside.log_probs[0]), atol=5e-3)


def test_a_refresh_beyond_the_protein_is_all_of_it(exact: TurboEsm) -> None:
    options = {"positions": [1, 5], "seed": 1}
    all_of_it = exact.generate("MKTAYIAK", refresh=8, **options)
    assert exact.generate("MKTAYIAK", refresh=10**18, **options).sequences == all_of_it.sequences
