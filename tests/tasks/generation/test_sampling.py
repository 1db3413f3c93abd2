"""Drawing residues: their distribution, cut-offs, constraints and seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.proteins.fasta import RESIDUES, STANDARD_RESIDUES
from esm_turbo.tasks.generation.options import GenerationOptions
from esm_turbo.tasks.generation.sampling import AllowedResidues, ResidueSampler, row_seeds
from tests.helpers.models import CLS, EOS, MASK, default_dtype
from tests.helpers.plain_generation import PREFIX, STANDARD

MakeModel = Callable[..., TurboEsmForMaskedLM]


def test_draws_have_the_distribution(turbo: TurboEsm) -> None:
    logits = torch.randn(33, generator=torch.Generator().manual_seed(0)).repeat(20_000, 1) * 2
    sampler = ResidueSampler(GenerationOptions(temperature=1.5), AllowedResidues(turbo.codes, 33), [0])
    tokens, log_probs = sampler.draw(logits, [0] * 20_000, [1] * 20_000)
    expected = (logits[0, STANDARD] / 1.5).softmax(0).numpy()
    counts = np.bincount(tokens, minlength=33)
    assert counts.sum() == counts[STANDARD].sum() == 20_000
    # Chi-squared with 19 degrees of freedom exceeds 44 once in a thousand times.
    assert ((counts[STANDARD] - 20_000 * expected) ** 2 / (20_000 * expected)).sum() < 44
    torch.testing.assert_close(torch.tensor(log_probs), logits[0].log_softmax(0)[torch.tensor(tokens)])


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}])
def test_options_that_leave_one_residue(turbo: TurboEsm, options: dict[str, float]) -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    sampler = ResidueSampler(GenerationOptions(**options), AllowedResidues(turbo.codes, 33), [0])
    tokens, _ = sampler.draw(logits, [0] * 50, [1] * 50)
    assert tokens == (logits[:, STANDARD].argmax(1) + 4).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 0.7, "top_k": 6, "top_p": 0.8}], ids=str)
def test_draws_are_those_of_multinomial(turbo: TurboEsm, options: dict[str, float]) -> None:
    """And take as much from the generators."""
    logits = 3 * torch.randn(200, 33, generator=torch.Generator().manual_seed(0))
    allowed = AllowedResidues(turbo.codes, 33, {2: "AGV"})
    one, other = (ResidueSampler(GenerationOptions(**options), allowed, [5, 6]) for _ in range(2))
    rows, positions = [0, 1] * 100, [1, 2, 3, 4] * 50
    with default_dtype(torch.float16):
        tokens, log_probs = one.draw(logits, rows, positions)
    weights = other.warpers(None, other.scores(logits, positions)).softmax(dim=1)
    expected = weights.argmax(dim=1).tolist()
    if options.get("temperature") != 0:
        expected = [
            int(w.multinomial(1, generator=other.generators[row])) for w, row in zip(weights, rows, strict=True)
        ]
    assert tokens == expected
    assert log_probs == [float(own[token]) for own, token in zip(logits.log_softmax(1), tokens, strict=True)]
    for a, b in zip(one.generators, other.generators, strict=True):
        assert torch.equal(a.get_state(), b.get_state())


def test_constraints_apply_before_cut_offs(turbo: TurboEsm) -> None:
    """Top-k keeps the most likely of the allowed residues, not the allowed ones of the most likely."""
    logits = torch.arange(33.0).repeat(200, 1) / 10
    sampler = ResidueSampler(GenerationOptions(top_k=2), AllowedResidues(turbo.codes, 33, "LAGVS"), [0])
    tokens, _ = sampler.draw(logits, [0] * 200, [1] * 200)
    assert set(tokens) == {7, 8}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_only_allowed_residues_are_generated(turbo: TurboEsm, tiny_model: MakeModel, data: st.DataObject) -> None:
    tiny = TurboEsm(tiny_model(), turbo.tokenizer)
    letters = st.sets(st.sampled_from(RESIDUES), min_size=2)
    everywhere = data.draw(st.none() | letters)
    by_position = data.draw(st.dictionaries(st.integers(23, 30), letters, max_size=3)) if everywhere is None else {}
    banned = data.draw(st.sampled_from([*RESIDUES, ""]))
    allowed = "".join(everywhere) if everywhere else {position: "".join(x) for position, x in by_position.items()}
    options = {"allowed": allowed, "banned": banned, "seed": data.draw(st.integers(0, 9))}
    for sequence, more in ((PREFIX, {"max_new_tokens": 8}), (PREFIX + "<mask>" * 8, {})):
        [generated] = tiny.generate(sequence, **options, **more).sequences
        assert generated.startswith(PREFIX)
        assert len(generated) == 30
        for position, letter in enumerate(generated[22:], start=23):
            assert letter in (everywhere or by_position.get(position, set(STANDARD_RESIDUES)))
            assert letter != banned


@pytest.mark.parametrize("token", [CLS, EOS, MASK, 1, 3, 24, 31])
def test_special_tokens_are_never_generated(turbo: TurboEsm, tiny_model: MakeModel, token: int) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.bias[token] = 1e4
    tiny = TurboEsm(model, turbo.tokenizer)
    for temperature in (0, 1.0, 100.0):
        [generated] = tiny.generate(PREFIX, max_new_tokens=8, temperature=temperature).sequences
        assert set(generated[22:]) <= set(STANDARD_RESIDUES)
        assert len(generated) == 30


def test_lower_case_constraints(exact: TurboEsm) -> None:
    [generated] = exact.generate(PREFIX, max_new_tokens=8, allowed="ac", banned="c").sequences
    assert generated == PREFIX + "A" * 8


def test_logits_that_are_not_finite(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.bias[5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        TurboEsm(model, turbo.tokenizer).generate("MKT", max_new_tokens=2)


def test_seeds_of_rows() -> None:
    seeds = [one for seed in range(50) for one in row_seeds(seed, 50)]
    assert len(set(seeds)) == 2500
    assert row_seeds(3, 7)[:4] == row_seeds(3, 4)
    assert row_seeds(3, 0) == []
    # A row's own seed reproduces it alone; a seed too large for a generator is never a row's.
    assert [row_seeds(seed, 1) for seed in row_seeds(3, 4)] == [[seed] for seed in row_seeds(3, 4)]
    assert all(0 <= seed < 10**8 for seed in row_seeds(2**70, 300))
    assert row_seeds((5, 6), 2) == [5, 6]
    for invalid in (-1, True, 1.5, [1], [1, 2, 3], [1, -2], "ab", None):
        with pytest.raises(ValueError, match="`seed` must be an integer of at least 0, or one for each of the 2 rows"):
            row_seeds(invalid, 2)


def test_x_is_not_generated_where_it_is_left_out(e1: TurboEsm) -> None:
    """Later steps would read it as a token."""
    with pytest.raises(ValueError, match="X may not be generated at position 6: the model leaves X out"):
        e1.generate("MKTAY<mask>A<mask>", allowed={6: "AX"})
    assert e1.generate("MKTAY<mask>A", allowed={6: "AX"}, banned="X", temperature=0).sequences == ["MKTAYAA"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed": ["A"]}, r"`allowed` must be residues, or residues by position, got \['A'\]"),
        ({"allowed": "AJ"}, "`allowed` holds 'J', which is not a residue code"),
        ({"allowed": {6: "A-"}}, r"`allowed\[6\]` holds '-'"),
        ({"allowed": {0: "A"}}, r"`allowed\[0\]`: positions are integers counted from 1"),
        ({"allowed": "A", "banned": "A"}, "no residue may be generated at any position"),
        ({"allowed": {6: "C"}, "banned": "C"}, "no residue may be generated at position 6"),
        ({"allowed": ""}, "no residue may be generated at any position"),
        ({"banned": ["<eos>"]}, "`banned` must be a string of residue letters"),
    ],
)
def test_invalid_constraints(turbo: TurboEsm, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllowedResidues(turbo.codes, 33, **options)
