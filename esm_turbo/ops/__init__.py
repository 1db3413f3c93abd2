"""Arithmetic on packed keys and values: the backends and their Triton kernels."""
