"""Kernels compiled side by side, in worker processes, into Triton's cache on disk."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from esm_turbo.ops import compilation, compile_worker, triton_encoder, triton_layer, warmup
from esm_turbo.ops.compilation import compile_together
from esm_turbo.ops.triton_launch import recorded
from esm_turbo.ops.variants import KernelCacheError, KernelError, Variant, failure

triton = pytest.importorskip("triton")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels."""
    if triton.knobs.runtime.interpret:
        pytest.fail("these tests compile kernels: run without TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def variants() -> list[Variant]:
    with torch.no_grad(), recorded(90) as found:
        x = torch.empty(16, 64, dtype=torch.bfloat16)
        triton_encoder.gelu_(x)
        triton_layer.gelu(x)
        triton_encoder.gelu_(x)
    return found


def wrong(variant: Variant) -> Variant:
    """Cannot be compiled: blocks are powers of two."""
    return variant._replace(constants=(100,))


def test_missing_variants_are_compiled_once(
    cache: Path, variants: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(variants) == 3
    assert len(set(variants)) == 2
    assert compile_together(variants, processes=2) == (2, [])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "esm-turbo: compiling 2 GPU kernels in 2 processes, once on this machine\n"
    assert all(variant.is_cached() for variant in variants)
    assert list(cache.rglob("gelu_.cubin"))
    assert compile_together(variants) == (0, [])
    assert capsys.readouterr().err == ""


def test_what_does_not_compile_is_named(cache: Path, variants: list[Variant]) -> None:
    count, reasons = compile_together([wrong(variants[0]), variants[1]], processes=1)
    assert count == 1
    (reason,) = reasons
    assert reason.startswith(f"triton {triton.__version__} cannot compile the GPU kernel 'gelu_': ")
    assert "\n" not in reason
    with pytest.raises(KernelError, match="cannot compile the GPU kernel 'gelu_'"):
        wrong(variants[0]).compile()


def test_a_process_that_dies_is_reported(cache: Path, variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.sys, "executable", "/bin/false")
    count, reasons = compile_together(variants, processes=1)
    assert count == 1
    assert reasons[0].startswith("the process that compiled the GPU kernel 'gelu")


def test_kernels_are_compiled_here_where_no_process_can_be_started(
    cache: Path, variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation.sys, "executable", str(cache / "none"))
    count, reasons = compile_together(variants)
    assert count == 0
    assert reasons == ["no process that compiles GPU kernels could be started: No such file or directory"]
    assert warmup._compile_all(variants) == 2
    assert all(variant.is_cached() for variant in variants)
    with pytest.raises(KernelError, match="cannot compile the GPU kernel 'gelu_'"):
        warmup._compile_all([wrong(variants[0])])


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(KernelCacheError, match=r"file, cannot be used \(.*\): mend it, or set TRITON_CACHE_DIR"):
        compile_together(variants)
    full = failure("gelu", OSError(28, os.strerror(28)))
    assert isinstance(full, KernelCacheError)
    assert "(No space left on device)" in str(full)


def test_a_worker_replies_to_every_request(cache: Path, variants: list[Variant]) -> None:
    requests, replies = io.BytesIO(), io.BytesIO()
    for variant in (wrong(variants[0]), variants[0]):
        pickle.dump(variant, requests)
    requests.seek(0)
    compile_worker.serve(requests, replies)
    replies.seek(0)
    assert "cannot compile" in pickle.load(replies)
    assert pickle.load(replies) is None
    assert not replies.read()


def test_workers_load_no_torch() -> None:
    code = "import sys, esm_turbo.ops.compile_worker, esm_turbo.ops.kernels.merge; assert 'torch' not in sys.modules"
    worker = compilation.subprocess.run([compilation.sys.executable, "-c", code], capture_output=True, timeout=120)
    assert worker.returncode == 0, worker.stderr
