"""The Triton kernels: device code only. These modules import triton, so nothing imports them before a kernel runs.

`triton_attention`, `triton_encode` and `triton_layer` launch them; `triton_layout` defines the layout of packed tensors
in their operands.
"""
