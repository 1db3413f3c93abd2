"""Runs on a small model, and the batches that they compute."""

from __future__ import annotations

import pytest

from esm_turbo import TurboEsm
from esm_turbo.tasks.embedding import batches as embedding
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from tests.helpers.embedding_files import TOKS_PER_BATCH, proteins


@pytest.fixture(scope="session")
def tiny_folder(turbo, tiny_model, tmp_path_factory):
    """A small checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    TurboEsm(tiny_model(), turbo.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    return TurboEsm.from_pretrained(tiny_folder, preset="exact", device="cpu")


@pytest.fixture
def run(tiny):
    """`run(out, records, file_format="pt", include=("mean", "per_tok"))` embeds records."""

    def embed(out, records=None, file_format="pt", include=("mean", "per_tok"), layers=(-1,), **options):
        request = EmbeddingRequest.of(tiny, layers, include)
        options = {"toks_per_batch": TOKS_PER_BATCH} | options
        return embed_records(
            tiny, proteins() if records is None else records, out, request, file_format=file_format, **options
        )

    return embed


@pytest.fixture
def computed(monkeypatch):
    """The computed sequences, batch by batch."""
    batches = []
    original = embedding._embed_batch

    def noting(turbo, rows, batch, *options):
        batches.append([turbo.codes.decode(rows[index][1:-1]) for index in batch])
        return original(turbo, rows, batch, *options)

    monkeypatch.setattr(embedding, "_embed_batch", noting)
    return batches
