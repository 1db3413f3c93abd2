"""Inline assembly for Triton's interpreter, which does not support it. Imports triton: import it within tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from esm_turbo.ops import attention_plan, triton_attention
from tests.helpers import ptx

_NUMPY = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}


class _Results:
    def __init__(self, results: Sequence[TensorHandle]) -> None:
        self.results = results

    def get_result(self, index: int) -> TensorHandle:
        return self.results[index]


def _create_inline_asm(
    self: Any, asm: str, constraints: str, values: Sequence[TensorHandle], types: Sequence[Any], pure: bool, pack: int
) -> _Results:
    arrays = np.broadcast_arrays(*(value.data for value in values))
    if pack == 2:
        # A register packs two 16-bit numbers; here it packs the same number twice.
        arrays = [np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) * np.uint32(0x10001) for x in arrays]
    results = []
    for bits, kind in zip(ptx.run(asm, constraints.count("="), arrays), types, strict=True):
        dtype = kind.scalar
        if pack == 2:
            assert np.array_equal(bits >> 16, bits & 0xFFFF)
            bits = (bits & 0xFFFF).astype(np.uint16)
        bits = np.broadcast_to(bits, arrays[0].shape)
        results.append(TensorHandle(np.ascontiguousarray(bits).view(_NUMPY[dtype.name]), dtype))
    return _Results(results)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter run the kernels with inline assembly, as on a GPU."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _create_inline_asm)
    monkeypatch.setattr(attention_plan, "interpreted", lambda: False)
    # Without its cache, which has launches without assembly.
    monkeypatch.setattr(triton_attention, "attention_plan", attention_plan.attention_plan.__wrapped__)
