"""The launchers of the Triton kernels. triton itself is imported when a kernel runs."""

from esm_turbo.ops.triton_attention import extend_attention
from esm_turbo.ops.triton_encode import encode
from esm_turbo.ops.triton_layer import gelu, rotate

__all__ = ["encode", "extend_attention", "gelu", "rotate"]
