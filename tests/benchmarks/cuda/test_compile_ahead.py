"""Kernels that are compiled before they are timed."""

from __future__ import annotations

import pytest

from benchmarks.cuda import compile_ahead
from benchmarks.harness import gpu_models, names
from esm_turbo.ops import triton_encode
from tests.helpers.benchmark_cases import TINY


def test_jobs_compiled_ahead_run(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[compile_ahead.Job] = []
    encoded: list[int] = []
    monkeypatch.setattr(compile_ahead, "compile_all", done.extend)
    monkeypatch.setattr(triton_encode, "encode", lambda codec, layer_idx, keys, *_, **__: encoded.append(keys.shape[2]))
    compile_ahead.embedded([(3, 70, 1), (1, 70, 1)])
    # Two rows at which the first is checked, and its own three; the second is checked as it is.
    assert len(done) == 3 * len(names.COMPRESSED)
    models = gpu_models.presets_of(TINY, ["exact", "turbo3", "paper"])
    compile_ahead.model([model.codec(model.turbo_config) for model in models.values()], [(1, 40, 0), (1, 40, 2)])
    for job in done:
        compile_ahead._compile(job)
    assert encoded and set(encoded) == {40}
    assert {job.shape for job in done} == {(2, 70, 1), (3, 70, 1), (1, 70, 1), (1, 40, 0), (1, 40, 2)}
