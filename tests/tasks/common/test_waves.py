"""Waves of contexts: how many are held, when the next ones are read, and what too little memory for a batch does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esm_turbo import ContextStore, TurboConfig, TurboEsm, TurboKVCache
from esm_turbo.tasks.common import ahead, waves
from esm_turbo.tasks.common.waves import Extensions, Rows, predict_rows

PROTEINS = ["MKTAYIAKQRQISFVKSHFS", "GSWKDLAEPLGSWKDLAEPL", "ACDEFGHIKLMNPQRSTVWY", "MKTAYIAKQRGSWKDLAEPL"]


def jobs(turbo: TurboEsm, proteins: Sequence[str] = PROTEINS, count: int = 2) -> Iterator[Rows]:
    """`count` rows of the width 2 after each protein."""
    codes = turbo.codes

    def make(numbers: Tensor) -> Extensions:
        return Extensions(torch.tensor([[codes.mask, codes.eos]]).repeat(len(numbers), 1), torch.zeros_like(numbers))

    for owner, protein in enumerate(proteins):
        ids = (codes.cls, *codes.encode(protein, "a protein"))
        yield Rows(owner, ids, len(ids), count, 2, make)


def held_in_waves(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, proteins: Sequence[str]) -> list[int]:
    sizes: list[int] = []
    original = waves._run_wave

    def watched(contexts: Any, wave: Any, held: dict[Any, Any], failed: Any) -> Any:
        sizes.append(len(held))
        return original(contexts, wave, held, failed)

    monkeypatch.setattr(waves, "_run_wave", watched)
    assert [owner for owner, _ in predict_rows(turbo, jobs(turbo, proteins), "turbo", 4096)] == list(
        range(len(proteins))
    )
    return sizes


def test_no_more_contexts_than_memory_for_them_are_held(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_in_waves(turbo, monkeypatch, PROTEINS) == [4]
    room_for_two = 45 * waves.cache_bytes(turbo.model.base_model, 1024) // 1024
    monkeypatch.setattr(ahead, "available_bytes", lambda device: int(room_for_two / waves._SHARE))
    assert held_in_waves(turbo, monkeypatch, PROTEINS) == [2, 2]


def test_equal_proteins_share_a_context(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_in_waves(turbo, monkeypatch, PROTEINS[:1] * 3) == [1]


class Shelf:
    """A source of contexts that knows the waves it was asked in, and by which thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.kept: dict[tuple[int, ...], TurboKVCache] = {}
        self.others = 0

    def find(self, turbo: Any, token_ids: Sequence[int], config: TurboConfig, /) -> TurboKVCache | None:
        self.asked.append(tuple(token_ids))
        self.others += threading.current_thread() is not threading.main_thread()
        return self.kept.get(tuple(token_ids))

    def get_or_compute(self, turbo: Any, token_ids: Sequence[int], config: Any, compute: Any, /) -> TurboKVCache:
        return self.kept.setdefault(tuple(token_ids), compute().select(0))

    def get_or_prefill(self, turbo: Any, sequences: Sequence[str], /) -> TurboKVCache:
        raise AssertionError("not of tokens")


def test_contexts_of_the_next_wave_are_read_while_others_run(turbo: TurboEsm) -> None:
    shelf = Shelf()
    # 21 tokens each, 4 batches of 11: two in a wave.
    found = predict_rows(turbo, jobs(turbo), "turbo", 11, store=shelf)
    first = [next(found)]
    assert len(shelf.asked) == shelf.others == 4
    assert len(shelf.kept) == 2
    first += found
    assert len(shelf.kept) == 4
    again = list(predict_rows(turbo, jobs(turbo), "turbo", 11, store=shelf))
    for (_, one), (_, other) in zip(first, again, strict=True):
        assert isinstance(one, list) and isinstance(other, list)
        assert torch.equal(one[0], other[0])


def test_the_next_wave_is_in_device_memory_before_the_first_is_done(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [values for _, values in predict_rows(turbo, jobs(turbo), "turbo", 4096)]
    with ContextStore(tmp_path / "store") as store:
        list(predict_rows(turbo, jobs(turbo), "turbo", 11, store=store))
    store, original = ContextStore(tmp_path / "store"), waves.log_probabilities
    seen: list[int] = []

    def waiting(*arguments: Any, **options: Any) -> Tensor:
        until = time.monotonic() + 60
        while store.info()["memory"]["device"]["contexts"] < 4 and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(store.info()["memory"]["device"]["contexts"])
        return original(*arguments, **options)

    monkeypatch.setattr(waves, "log_probabilities", waiting)
    # 21 tokens each, 4 batches of 11: two in a wave.
    found = predict_rows(turbo, jobs(turbo), "turbo", 11, store=store)
    first = next(found)
    assert seen[0] == 4
    for one, (_, other) in zip(expected, [first, *found], strict=True):
        assert isinstance(one, list) and isinstance(other, list)
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-4)
    assert store.info()["memory"]["device"]["held"] == 0


def test_a_batch_that_does_not_fit_runs_protein_by_protein(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [values for _, values in predict_rows(turbo, jobs(turbo), "turbo", 4096)]
    original, most = waves.log_probabilities, 4

    def small(turbo: Any, input_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if len(input_ids) > most:
            raise RuntimeError("CUDA out of memory")
        return original(turbo, input_ids, *arguments, **options)

    monkeypatch.setattr(waves, "log_probabilities", small)
    for one, (_, other) in zip(expected, predict_rows(turbo, jobs(turbo), "turbo", 4096), strict=True):
        assert isinstance(one, list) and isinstance(other, list)
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-4)
    most = 1
    assert all(isinstance(error, RuntimeError) for _, error in predict_rows(turbo, jobs(turbo), "turbo", 4096))


def test_other_errors_are_raised(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "log_probabilities", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(predict_rows(turbo, jobs(turbo), "turbo", 4096))
