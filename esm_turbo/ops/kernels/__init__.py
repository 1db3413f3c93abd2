"""The Triton kernels: device code only. These modules import triton, so nothing imports them before a kernel runs.

`triton_attention`, `triton_encode`, `triton_layer`, `triton_encoder`, `decoded_attention` and `copies` launch them;
`triton_layout` defines the layout of packed tensors in their operands.
"""
