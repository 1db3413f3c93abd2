"""The Triton kernels: what runs on a GPU, and nothing else. Their modules need triton; nobody imports them before.

`triton_kernels` and `triton_encode` launch them, `triton_layout` says how packed tensors lie in their operands.
"""
