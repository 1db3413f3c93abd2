"""Arithmetic on packed caches: the backends and their Triton kernels."""
