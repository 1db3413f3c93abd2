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
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return self
