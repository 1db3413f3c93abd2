"""The Triton kernels: what runs on a GPU, and nothing else. Their modules need triton; nobody imports them before.

`triton_kernels` and `encode_ops` launch them, `kernel_layout` says how packed tensors lie in their operands.
"""
