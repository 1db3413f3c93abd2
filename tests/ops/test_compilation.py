"""Kernels compiled side by side, in worker processes, into Triton's cache on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from esm_turbo.ops import compilation, triton_encoder, triton_layer
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
    assert compile_together(variants, processes=2) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "esm-turbo: compiling 2 GPU kernels in 2 processes, once on this machine\n"
    assert all(variant.is_cached() for variant in variants)
    assert list(cache.rglob("gelu_.cubin"))
    assert compile_together(variants) == 0
    assert capsys.readouterr().err == ""


def test_what_does_not_compile_is_named(cache: Path, variants: list[Variant]) -> None:
    with pytest.raises(KernelError) as caught:
        compile_together([wrong(variants[0]), variants[1]], processes=1)
    reason = str(caught.value)
    assert reason.startswith(f"triton {triton.__version__} cannot compile the GPU kernel 'gelu_': ")
    assert "\n" not in reason
    # The others are there.
    assert variants[1].is_cached()


@pytest.mark.parametrize("python", ["/bin/false", "/absent"])
def test_kernels_are_compiled_here_where_processes_die_or_cannot_be_started(
    cache: Path, variants: list[Variant], monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(compilation.sys, "executable", python)
    assert compile_together(variants) == 2
    assert all(variant.is_cached() for variant in variants)
    with pytest.raises(KernelError, match="cannot compile the GPU kernel 'gelu_'"):
        compile_together([wrong(variants[0])])


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


def test_processes_that_compile_load_no_torch() -> None:
    code = "import sys, esm_turbo.ops.compilation, esm_turbo.ops.kernels.merge; assert 'torch' not in sys.modules"
    worker = compilation.subprocess.run([compilation.sys.executable, "-c", code], capture_output=True, timeout=120)
    assert worker.returncode == 0, worker.stderr


def test_the_slowest_kernels_share_a_process_with_the_fewest(variants: list[Variant]) -> None:
    named = [variants[0]._replace(name=name) for name in "abcdefgh"]
    shares = compilation._shares(named, 3)
    assert ["".join(variant.name for variant in share) for share in shares] == ["afg", "beh", "cd"]
