"""Rotary frequencies that stay in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from torch import Tensor

if TYPE_CHECKING:
    from torch.nn import Module as _Module
else:
    _Module = object


class Float32Frequencies(_Module):
    """Mixin of a rotary embedding whose frequencies stay in float32 whatever the model is cast to."""

    inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and (kept := before[name]) is not None and buffer.dtype != kept.dtype:
                self._buffers[name] = kept.to(buffer.device)
        return self
