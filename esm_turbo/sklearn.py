"""Mean embeddings as a transformer of scikit-learn, as in `make_pipeline(TurboEsmEmbedder(), Ridge())`.

Needs the extra `sklearn`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from esm_turbo.files.identity import kept_digest
from esm_turbo.proteins.fasta import ProteinRecord, normalize_sequence
from esm_turbo.tasks.embedding.files import sequence_hash
from esm_turbo.tasks.embedding.reading import read_embeddings
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from esm_turbo.turbo_esm import TurboEsm

Array = npt.NDArray[np.float32]


class TurboEsmEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Turn protein sequences into mean embeddings.

    Nothing is learned from the sequences, so that cross-validation leaks nothing. The model is loaded once per process,
    and is not part of a pickle.

    Args:
        model: hub id or folder of a checkpoint; None for the embedded model.
        layer: layer whose hidden states are averaged over the residues; negative numbers count from the last.
        device: of the model; None for the best one available.
        toks_per_batch: padded tokens per batch; None chooses by device, see `TurboEsm.embed`.
        cache: folder that keeps embeddings, in the format of `esm-turbo embed --format safetensors`; None keeps none.
            Folds of a cross-validation then compute each sequence once, also in parallel and in later runs.

    Attributes:
        weights_: digest of the model's weights; other ones are refused after `fit`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        layer: int = -1,
        device: str | None = None,
        toks_per_batch: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.model = model
        self.layer = layer
        self.device = device
        self.toks_per_batch = toks_per_batch
        self.cache = cache

    def fit(self, X: Iterable[str], y: object = None) -> Self:
        """Check the sequences and load the model.

        Args:
            X: sequences: a list, a Series, or an array [n] or [n, 1].
            y: ignored.

        Raises:
            ValueError: a sequence is not one, there is none, or the model cannot be loaded.
        """
        _sequences(X)
        turbo = self._turbo()
        self._request(turbo)
        self.weights_ = kept_digest(turbo.model)
        self._n_features_out = int(turbo.model.config.hidden_size)
        return self

    def transform(self, X: Iterable[str]) -> Array:
        """Mean embeddings, float32 [n, hidden_size].

        Args:
            X: as for `fit`.

        Raises:
            NotFittedError: (a ValueError) `fit` was not called.
            ValueError: a sequence is not one, there is none, or the model is another one than at `fit`.
        """
        check_is_fitted(self, "weights_")
        sequences = _sequences(X)
        turbo = self._turbo()
        if kept_digest(turbo.model) != self.weights_:
            raise ValueError(f"the weights of {turbo.name} are not those of `fit`; fit again")
        distinct = list(dict.fromkeys(sequences))
        embedded = dict(zip(distinct, self._embedded(turbo, distinct), strict=True))
        return np.stack([embedded[sequence] for sequence in sequences])

    def _turbo(self) -> TurboEsm:
        return _loaded(None if self.model is None else os.fspath(self.model), self.device)

    def _request(self, turbo: TurboEsm) -> EmbeddingRequest:
        return EmbeddingRequest.of(turbo, [self.layer], ["mean"])

    def _embedded(self, turbo: TurboEsm, sequences: list[str]) -> list[Array]:
        """Embeddings of distinct sequences."""
        request = self._request(turbo)
        [layer] = request.layers
        if self.cache is None:
            found = turbo.embed(sequences, [layer], ["mean"], self.toks_per_batch)
            return [one.mean_representations[layer].numpy() for one in found if one.mean_representations is not None]
        folder = Path(self.cache)
        records = [ProteinRecord(sequence_hash(sequence), sequence) for sequence in sequences]
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Processes of a parallel search wait for each other.
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            run = embed_records(
                turbo,
                records,
                folder,
                request,
                file_format="safetensors",
                names="hash",
                toks_per_batch=self.toks_per_batch,
            )
        if run.failed:
            number = 1 + [record.id for record in records].index(run.failed[0].record)
            raise ValueError(f"sequence {number}: {run.failed[0].reason}")
        name = f"mean_representations.{layer}"
        return [arrays[name] for arrays in read_embeddings(folder, "safetensors", records)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []
        return tags


@lru_cache(maxsize=2)
def _loaded(model: str | None, device: str | None) -> TurboEsm:
    """A model, once per process."""
    return TurboEsm.from_pretrained(model, device=device, calibration=False if model else None)


def _sequences(X: Iterable[str]) -> list[str]:
    """Residues of sequences.

    Raises:
        TypeError: one is not a string.
        ValueError: one is not a sequence, or there is none.
    """
    if isinstance(X, str):
        raise ValueError("X must be a list of sequences, got one string")
    values = np.asarray(X, dtype=object)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(f"X must be sequences in an array [n] or [n, 1], got {list(values.shape)}")
    if not len(values):
        raise ValueError("X must hold at least one sequence, got none")
    return [normalize_sequence(value, name=f"sequence {number}") for number, value in enumerate(values, start=1)]
