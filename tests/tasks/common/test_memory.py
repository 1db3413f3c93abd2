"""Memory estimates against PyTorch's allocations, and the free memory that systems report."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.measure import peak_allocation
from esm_turbo import TurboEsm
from esm_turbo.config import Geometry
from esm_turbo.tasks.common import memory
from esm_turbo.tasks.common.arms import prefill_ids
from esm_turbo.tasks.common.memory import NotEnoughMemoryError, cache_bytes, check_memory, forward_bytes
from tests.helpers.models import random_ids


@pytest.mark.parametrize("arm", ["plain", "frozen", "turbo"])
def test_the_estimate_matches_a_forward(turbo: TurboEsm, arm: str) -> None:
    ids, _ = random_ids([600])
    esm = turbo.model.esm
    needed = forward_bytes(esm.config, 600, 4)
    geometry = Geometry.of(esm.config)
    if arm == "plain":
        with torch.no_grad():
            peak = peak_allocation(lambda: esm(ids))
    else:
        needed += cache_bytes(geometry, 600, 32 if arm == "frozen" else esm.turbo_config.mean_bits)
        peak = peak_allocation(lambda: prefill_ids(turbo, ids[0].tolist(), arm))
    assert 0.75 * peak < needed < 1.5 * peak


def test_eager_attention_materialises_its_scores(turbo: TurboEsm) -> None:
    config = turbo.model.esm.config
    more = forward_bytes(config, 1000, 2, eager=True) - forward_bytes(config, 1000, 2)
    assert more == 2 * 2 * config.num_attention_heads * 1000**2
    assert forward_bytes(config, 1000, 4) == 2 * forward_bytes(config, 1000, 2)


def test_the_error_names_both_sizes(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * 2**30)
    check_memory(turbo.model.esm, 1000, stored=True)
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_memory(turbo.model.esm, 1_000_000, stored=True)
    assert str(caught.value) == (
        f"1,000,000 tokens at once need about {_needed(turbo, 1_000_000):.1f} GiB of memory, 3.0 GiB are free on cpu;"
        " use a shorter protein, a smaller model or a larger machine"
    )
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    check_memory(turbo.model.esm, 1_000_000, stored=True)


def _needed(turbo: TurboEsm, tokens: int) -> float:
    esm = turbo.model.esm
    stored = cache_bytes(Geometry.of(esm.config), tokens, esm.turbo_config.mean_bits)
    return (forward_bytes(esm.config, tokens, 4) + stored) / 2**30


def test_free_memory_of_this_machine() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_free_memory_from_the_kernel(tmp_path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert memory._meminfo(path) == 64 * 1024
    path.write_text("MemTotal:       100 kB\n")
    assert memory._meminfo(path) is None
    assert memory._meminfo(tmp_path / "missing") is None


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 700 + 250), ("max", None)])
def test_free_memory_of_a_control_group(tmp_path, limit: str, left: int | None) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\nactive_file 150\n")
    assert memory._control_group(tmp_path) == left
    assert memory._control_group(tmp_path / "missing") is None
