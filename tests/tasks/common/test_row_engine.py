"""Waves of contexts: how many are held, when the next ones are read, and what too little memory for a batch does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.proteins.tokens import TokenCodes
from esm_turbo.tasks.common import row_engine
from esm_turbo.tasks.common.forwards import context_config
from esm_turbo.tasks.common.row_engine import run_rows
from esm_turbo.tasks.common.rows import ItemRows, RowBatch, RowGroup, RowRun

PROTEINS = ["MKTAYIAKQRQISFVKSHFS", "GSWKDLAEPLGSWKDLAEPL", "ACDEFGHIKLMNPQRSTVWY", "MKTAYIAKQRGSWKDLAEPL"]


@dataclass(frozen=True, kw_only=True)
class MaskAfter(RowGroup):
    """Rows of a mask and `<eos>` after a protein."""

    codes: TokenCodes

    def rows(self, numbers: Tensor) -> RowBatch:
        input_ids = torch.tensor([[self.codes.mask, self.codes.eos]]).repeat(len(numbers), 1)
        return RowBatch(input_ids, torch.zeros_like(numbers))

    def reduce(self, numbers: Tensor, log_probs: Tensor) -> Tensor:
        return log_probs


class Protein(ItemRows[Tensor]):
    def __init__(self, turbo: TurboEsm, residues: str, count: int) -> None:
        ids = (turbo.codes.cls, *turbo.codes.encode(residues, "a protein"))
        self.groups = [MaskAfter(context=ids, kept=len(ids), count=count, width=2, codes=turbo.codes)]

    def result(self, predicted: Sequence[Tensor]) -> Tensor:
        [found] = predicted
        return found


def predict(
    turbo: TurboEsm, proteins: Sequence[str] = PROTEINS, tokens: int = 4096, store: Any = None
) -> Iterator[Tensor | Exception]:
    """The predictions of two rows after each protein."""
    items = (Protein(turbo, one, 2) for one in proteins)
    return run_rows(turbo, [RowRun(items, context_config(turbo, "turbo"), tokens)], store=store)


def held_in_waves(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, proteins: Sequence[str]) -> list[int]:
    sizes: list[int] = []
    original = row_engine._run_wave

    def watched(turbo: Any, wave: Any, held: Any, *rest: Any) -> None:
        sizes.append(len(held))
        original(turbo, wave, held, *rest)

    monkeypatch.setattr(row_engine, "_run_wave", watched)
    assert len(list(predict(turbo, proteins))) == len(proteins)
    return sizes


def test_no_more_contexts_than_memory_for_them_are_held(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_in_waves(turbo, monkeypatch, PROTEINS) == [4]
    room_for_two = 45 * row_engine.cache_bytes(turbo.model.base_model, 1024) // 1024
    monkeypatch.setattr(row_engine, "available_bytes", lambda device: int(room_for_two / row_engine._SHARE))
    assert held_in_waves(turbo, monkeypatch, PROTEINS) == [2, 2]


def test_equal_proteins_share_a_context(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_in_waves(turbo, monkeypatch, PROTEINS[:1] * 3) == [1]


def test_the_next_wave_is_in_device_memory_before_the_first_is_done(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(predict(turbo))
    with ContextStore(tmp_path / "store") as store:
        list(predict(turbo, tokens=11, store=store))
    store, original = ContextStore(tmp_path / "store"), row_engine.log_probabilities
    seen: list[int] = []

    def waiting(*arguments: Any, **options: Any) -> Tensor:
        until = time.monotonic() + 60
        while store.info()["memory"]["device"]["contexts"] < 4 and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(store.info()["memory"]["device"]["contexts"])
        return original(*arguments, **options)

    monkeypatch.setattr(row_engine, "log_probabilities", waiting)
    # 21 tokens each, 4 batches of 11: two in a wave.
    found = predict(turbo, tokens=11, store=store)
    first = next(found)
    assert seen[0] == 4
    for one, other in zip(expected, [first, *found], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert store.info()["memory"]["device"]["held"] == 0


def test_a_batch_that_does_not_fit_runs_protein_by_protein(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(predict(turbo))
    original, most = row_engine.log_probabilities, 4

    def small(turbo: Any, input_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if len(input_ids) > most:
            raise RuntimeError("CUDA out of memory")
        return original(turbo, input_ids, *arguments, **options)

    monkeypatch.setattr(row_engine, "log_probabilities", small)
    for one, other in zip(expected, predict(turbo), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    most = 1
    assert all(isinstance(error, RuntimeError) for error in predict(turbo))


def test_a_full_disk_ends_storing_alone(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = list(predict(turbo))
    with ContextStore(tmp_path / "store") as store:
        list(predict(turbo, PROTEINS[:1], store=store))

        def full(*_: Any, **__: Any) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        with monkeypatch.context() as patched:
            patched.setattr("esm_turbo.files.artifacts.save_file", full)
            found = list(predict(turbo, store=store))
        [warned] = caplog.records
        assert "No space left" in warned.getMessage() and "goes on without storing" in warned.getMessage()
        for own, theirs in zip(found, expected, strict=True):
            assert torch.allclose(own, theirs, rtol=0, atol=1e-4)
        assert store.info()["contexts"] == 1
        # With room again, they are stored.
        list(predict(turbo, store=store))
        assert store.info()["contexts"] == len(PROTEINS)


def test_other_errors_are_raised(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_engine, "log_probabilities", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(predict(turbo))
