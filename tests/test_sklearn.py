"""`TurboEsmEmbedder` as scikit-learn expects a transformer to be."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from esm_turbo.sklearn import TurboEsmEmbedder

SEQUENCES = ["MKTAYIAKQR", "GSGS", "LLKRRACDEFG", "MKTAY", "ACDEFGHIKLMNPQRSTVWY", "GSGSW"]
LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))


class OfNumbers(TurboEsmEmbedder):
    """The embedder on rows of numbers, each of which stands for a residue: scikit-learn's checks give no other data."""

    def fit(self, X, y=None):
        X = self._validate(X, reset=True)
        return super().fit(_residues(X), y)

    def transform(self, X):
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, "weights_")
        return super().transform(_residues(self._validate(X, reset=False)))

    def _validate(self, X, reset):
        from sklearn.utils.validation import validate_data

        return validate_data(self, X, reset=reset)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array, tags.input_tags.two_d_array, tags.input_tags.string = False, True, False
        return tags


def _residues(X):
    return ["".join(row) for row in LETTERS[np.floor(np.abs(X)).astype(np.int64) % len(LETTERS)]]


LEFT_OUT = {
    "check_methods_sample_order_invariance": "allows no rounding; see test_batches_change_no_more_than_rounding",
    "check_methods_subset_invariance": "the same",
    "check_array_api_input": "skips itself unless an environment variable is set; the embedder returns NumPy arrays",
}


def check_name(check: Callable[..., None]) -> str:
    return check.func.__name__ if isinstance(check, partial) else check.__name__


CHECKS = [(check_name(check), check) for _, check in estimator_checks_generator(OfNumbers())]


@pytest.mark.parametrize("check", [check for name, check in CHECKS if name not in LEFT_OUT], ids=check_name)
def test_checks_of_scikit_learn(check: Callable[..., None]) -> None:
    check(OfNumbers(device="cpu"))


def test_checks_that_are_left_out_exist() -> None:
    assert set(LEFT_OUT) <= {name for name, _ in CHECKS} and len(CHECKS) > 30


def test_batches_change_no_more_than_rounding() -> None:
    embedder = TurboEsmEmbedder(device="cpu", toks_per_batch=32).fit(SEQUENCES)
    together = embedder.transform(SEQUENCES)
    alone = np.concatenate([embedder.transform([sequence]) for sequence in SEQUENCES])
    # Sums in float32, in another order.
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(embedder.transform(SEQUENCES[::-1])[::-1], together, rtol=1e-4, atol=1e-5)


def test_embeddings_are_those_of_embed(turbo) -> None:
    expected = [one.mean_representations[12].numpy() for one in turbo.embed(SEQUENCES, include="mean")]
    found = TurboEsmEmbedder(device="cpu").fit_transform([*SEQUENCES, SEQUENCES[0]])
    assert found.dtype == np.float32 and found.shape == (7, 256)
    np.testing.assert_allclose(found[:6], expected, rtol=1e-4, atol=1e-5)
    assert (found[6] == found[0]).all()


@pytest.mark.parametrize("kind", [list, tuple, np.array, pd.Series, lambda x: np.array(x)[:, None], pd.DataFrame])
def test_containers(kind) -> None:
    embedder = TurboEsmEmbedder(device="cpu", layer=1)
    expected = embedder.fit_transform(SEQUENCES[:2])
    np.testing.assert_array_equal(embedder.transform(kind(SEQUENCES[:2])), expected)


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        ("MKTAY", ValueError, "X must be a list of sequences, got one string"),
        ([], ValueError, "X must hold at least one sequence, got none"),
        ([["A", "C"]], ValueError, r"array \[n\] or \[n, 1\], got \[1, 2\]"),
        (["MKTAY", "MK1"], ValueError, "sequence 2: position 3 is '1'"),
        (["MKTAY", None], TypeError, "sequence 2: a sequence must be a string, got NoneType"),
        ([1.5], TypeError, "sequence 1: a sequence must be a string, got float"),
    ],
)
def test_bad_sequences(X, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TurboEsmEmbedder(device="cpu").fit(X)


def test_it_must_be_fitted_and_can_be_cloned() -> None:
    embedder = TurboEsmEmbedder(device="cpu", layer=3, toks_per_batch=64)
    with pytest.raises(NotFittedError):
        embedder.transform(SEQUENCES)
    copy = clone(embedder.fit(SEQUENCES))
    assert copy.get_params() == embedder.get_params() and not hasattr(copy, "weights_")


def test_a_pickle_holds_no_weights_and_works() -> None:
    embedder = TurboEsmEmbedder(device="cpu").fit(SEQUENCES)
    content = pickle.dumps(embedder)
    assert len(content) < 2000
    np.testing.assert_array_equal(pickle.loads(content).transform(SEQUENCES), embedder.transform(SEQUENCES))


def test_other_weights_than_those_of_fit_are_refused() -> None:
    embedder = TurboEsmEmbedder(device="cpu").fit(SEQUENCES)
    embedder.weights_ = "other"
    with pytest.raises(ValueError, match="the weights of esm2-mini are not those of `fit`; fit again"):
        embedder.transform(SEQUENCES)


def test_columns_have_names() -> None:
    embedder = TurboEsmEmbedder(device="cpu").set_output(transform="pandas")
    frame = embedder.fit_transform(pd.Series(SEQUENCES, index=list("abcdef")))
    assert list(frame.columns[:2]) == ["turboesmembedder0", "turboesmembedder1"] and len(frame.columns) == 256
    table = pd.DataFrame({"sequence": SEQUENCES, "charge": range(6)})
    columns = make_column_transformer((TurboEsmEmbedder(device="cpu"), "sequence"), ("passthrough", ["charge"]))
    assert columns.fit_transform(table).shape == (6, 257)


def test_a_cache_is_used_again(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "new" / "cache"
    embedder = TurboEsmEmbedder(device="cpu", cache=folder)
    expected = TurboEsmEmbedder(device="cpu").fit_transform(SEQUENCES)
    np.testing.assert_allclose(embedder.fit_transform(SEQUENCES[:4]), expected[:4], rtol=1e-4, atol=1e-5)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 4
    first = embedder.transform(SEQUENCES)
    times = {path: path.stat().st_mtime_ns for path in files}
    np.testing.assert_array_equal(embedder.transform(SEQUENCES[::-1]), first[::-1])
    assert {path: path.stat().st_mtime_ns for path in files} == times
    assert len(sorted(folder.glob("*.safetensors"))) == 6
    with pytest.raises(ValueError, match=r"other settings|made with"):
        TurboEsmEmbedder(device="cpu", layer=2, cache=folder).fit_transform(SEQUENCES)


def test_pipelines_with_cross_validation(tmp_path) -> None:
    fitness = np.array([len(sequence) for sequence in SEQUENCES], dtype=float)
    pipeline = make_pipeline(TurboEsmEmbedder(device="cpu", cache=tmp_path / "cache"), Ridge())
    assert cross_val_predict(pipeline, SEQUENCES, fitness, cv=3).shape == (6,)
    search = GridSearchCV(pipeline, {"turboesmembedder__toks_per_batch": [64, 4096], "ridge__alpha": [1.0]}, cv=2)
    assert np.isfinite(search.fit(SEQUENCES, fitness).predict(SEQUENCES)).all()
