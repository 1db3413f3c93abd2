"""Figures of one comparison, against hand-made examples and SciPy's own definitions."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine as cosine_distance
from scipy.special import softmax
from scipy.stats import entropy

from esm_turbo.evaluate.metrics import Accuracy, LayerErrors, Outputs, TokenErrors


def random_outputs(seed: int, tokens: int = 12, hidden: int = 8, vocabulary: int = 5) -> Outputs:
    generator = np.random.default_rng(seed)
    return Outputs(generator.normal(size=(tokens, hidden)), 3 * generator.normal(size=(tokens, vocabulary)))


def part_of(outputs: Outputs, tokens: slice) -> Outputs:
    layers = None if outputs.layers is None else outputs.layers[:, tokens]
    return Outputs(outputs.hidden[tokens], outputs.logits[tokens], layers)


def test_errors_equal_scipy_definitions() -> None:
    reference, other = random_outputs(0), random_outputs(1)
    errors = TokenErrors.compare(reference, other)
    for token in range(len(errors)):
        a, b = reference.hidden[token], other.hidden[token]
        p, q = softmax(reference.logits[token]), softmax(other.logits[token])
        assert errors.cosine[token] == pytest.approx(1 - cosine_distance(a, b), abs=1e-12)
        assert errors.kl[token] == pytest.approx(entropy(p, q), rel=1e-9)
        assert errors.agrees[token] == float(p.argmax() == q.argmax())
    expected = np.linalg.norm(other.hidden - reference.hidden) / np.linalg.norm(reference.hidden)
    assert errors.accuracy().relative_rms_error == pytest.approx(expected, rel=1e-12)


def test_divergence_is_of_the_reference_from_the_other() -> None:
    sure, unsure = np.log([[0.98, 0.01, 0.01]]), np.log([[0.6, 0.3, 0.1]])
    hidden = np.ones((1, 2))
    expected = 0.98 * np.log(0.98 / 0.6) + 0.01 * np.log(0.01 / 0.3) + 0.01 * np.log(0.1)
    forward = TokenErrors.compare(Outputs(hidden, sure), Outputs(hidden, unsure)).kl[0]
    backward = TokenErrors.compare(Outputs(hidden, unsure), Outputs(hidden, sure)).kl[0]
    assert forward == pytest.approx(expected, rel=1e-9)
    assert abs(forward - backward) > 0.1


def test_relative_rms_is_sensitive_to_scale() -> None:
    reference = random_outputs(2)
    accuracy = TokenErrors.compare(reference, Outputs(1.1 * reference.hidden, reference.logits)).accuracy()
    assert accuracy.cosine_min == pytest.approx(1.0, abs=1e-12)
    assert accuracy.relative_rms_error == pytest.approx(0.1, rel=1e-9)


def test_equal_outputs_have_no_error() -> None:
    reference = random_outputs(3)
    accuracy = TokenErrors.compare(reference, reference).accuracy()
    assert accuracy.kl_mean == accuracy.kl_q99 == accuracy.relative_rms_error == 0.0
    assert accuracy.top1_agreement == 1.0
    assert accuracy.cosine_min == pytest.approx(1.0, abs=1e-12)
    assert accuracy.tokens == 12


def test_quantiles_are_those_of_the_worst_tokens() -> None:
    grid = np.arange(101) / 100
    accuracy = TokenErrors(grid, grid, np.r_[np.zeros(25), np.ones(76)], grid, np.ones(101)).accuracy()
    expected = Accuracy(101, 0.5, 0.01, 0.0, 0.5, 0.99, 76 / 101, 0.5**0.5)
    assert asdict(accuracy) == pytest.approx(asdict(expected), rel=1e-12)


@given(st.integers(0, 1000), st.integers(1, 11), st.permutations(range(12)))
def test_neither_order_nor_batching_matters(seed: int, cut: int, order: list[int]) -> None:
    reference, other = random_outputs(seed), random_outputs(seed + 1)
    whole = TokenErrors.compare(reference, other)
    parts = [
        TokenErrors.compare(part_of(reference, part), part_of(other, part)) for part in (slice(cut), slice(cut, None))
    ]
    joined = TokenErrors.join(parts)[order].accuracy()
    for name, value in vars(whole.accuracy()).items():
        assert getattr(joined, name) == pytest.approx(value, rel=1e-12), name


def test_outputs_join_and_split_with_their_layers() -> None:
    whole = random_outputs(4)
    whole = Outputs(whole.hidden, whole.logits, np.arange(3 * 12 * 8, dtype=np.float32).reshape(3, 12, 8))
    again = Outputs.join([part_of(whole, slice(5)), part_of(whole, slice(5, None))])
    assert np.array_equal(again.hidden, whole.hidden)
    assert np.array_equal(again.logits, whole.logits)
    assert np.array_equal(again.layers, whole.layers)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["hidden", "logits"])
def test_non_finite_outputs_are_refused(where: str, value: float) -> None:
    good, bad = random_outputs(5), random_outputs(6)
    getattr(bad, where)[3, 1] = value
    with pytest.raises(ValueError, match="the output holds NaN or infinity"):
        TokenErrors.compare(good, bad)
    with pytest.raises(ValueError, match="the reference holds NaN or infinity"):
        TokenErrors.compare(bad, good)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        TokenErrors.compare(part_of(random_outputs(0), slice(0)), part_of(random_outputs(1), slice(0))).accuracy()


def test_zero_vectors_give_numbers() -> None:
    zero, other = Outputs(np.zeros((2, 4)), np.zeros((2, 3))), random_outputs(7, 2, 4, 3)
    accuracy = TokenErrors.compare(other, zero).accuracy()
    assert accuracy.cosine_mean == 0.0
    assert accuracy.relative_rms_error == pytest.approx(1.0)


def test_layers_add_up_over_batches() -> None:
    generator = np.random.default_rng(0)
    reference, other = generator.normal(size=(2, 3, 10, 4)).astype(np.float32)
    errors = LayerErrors()
    errors.add(reference[:, :4], other[:, :4])
    errors.add(reference[:, 4:], other[:, 4:])
    assert errors.tokens == 10
    for layer, (cosine, relative_rms) in enumerate(errors.figures()):
        cosines = [1 - cosine_distance(a, b) for a, b in zip(reference[layer], other[layer], strict=True)]
        ratio = np.linalg.norm(other[layer] - reference[layer]) / np.linalg.norm(reference[layer])
        assert cosine == pytest.approx(np.mean(cosines), abs=1e-6)
        assert relative_rms == pytest.approx(ratio, rel=1e-6)
