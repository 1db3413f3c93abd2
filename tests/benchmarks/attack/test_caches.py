"""The independent model of caches notices what it is there for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.attack import caches
from esm_turbo import TurboKVCache


def crop_too_much(self: TurboKVCache, tokens: int | torch.Tensor, crop: Callable[..., None]) -> None:
    crop(self, torch.as_tensor(tokens).clamp_min(1) - 1 if torch.is_tensor(tokens) else max(0, tokens - 1))


def forget_a_value(self: TurboKVCache, path: Path, save: Callable[..., None]) -> None:
    for layer in self.layers:
        values = layer.packed["values"].clone()
        values[:, :, :1] = 0
        layer.packed["values"] = values
    save(self, path)


def select_others(self: TurboKVCache, indices: torch.Tensor, select: Callable[..., None]) -> None:
    select(self, torch.zeros_like(indices))


def find_first(preset: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the first of some random sequences that finds something says."""
    monkeypatch.setattr(caches, "_PRESETS", (preset,))
    for seed in range(12):
        wrong = caches.Operations(random.Random(seed), preset).run()
        if wrong:
            return wrong
    return ""


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("crop", crop_too_much, "lengths are"),
        ("save", forget_a_value, "wrong by"),
        ("batch_select_indices", select_others, "lengths are|tokens of row|wrong by"),
    ],
)
def test_wrong_operations_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, wrong: Callable[..., None], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    right = getattr(TurboKVCache, method)
    monkeypatch.setattr(TurboKVCache, method, lambda self, argument: wrong(self, argument, right))
    found = find_first("exact", monkeypatch)
    assert any(part in found for part in said.split("|")), found


@pytest.mark.parametrize("preset", ["exact", "turbo3"])
def test_right_operations_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preset: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert caches.Operations(random.Random(1), preset).run() == ""
