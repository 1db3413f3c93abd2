"""The place of the Triton kernels. There is none yet, so `backend="triton"` is refused with that reason.

Importing this module needs no triton.
"""

from __future__ import annotations

__all__: list[str] = []
