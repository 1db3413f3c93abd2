"""Triton kernel for linear layers of few rows, which take as long as their weights take to be read.

A matrix product of many rows reuses weights from shared memory. With few rows each weight is used once, so a lane
loads the very weights that it multiplies, sixteen bytes at a time, and keeps them in registers: all of a program's
weights are on their way before it waits for the kernel that computes its input.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INVERSE_SQRT2: tl.constexpr = tl.constexpr(0.7071067811865475)


@triton.jit
def _row_of(COUNT: tl.constexpr, WARPS: tl.constexpr):
    """Which of COUNT rows each row of a loaded tile belongs to: eight lanes' rows, for each warp, and so on."""
    i = tl.arange(0, COUNT * WARPS)
    return i // (8 * WARPS) * 8 + i % 8


@triton.jit
def _load_operand(ptr, row, first_input, stride_input, WARPS: tl.constexpr):
    """32 inputs of rows per warp, from `first_input` on: [WARPS, rows, 32].

    In a product, four lanes share a row and hold inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each sixteen. They load
    eight neighbouring ones each. A sum does not depend on the order of its terms, so these are counted as the ones that
    lanes should hold, in both operands, and nothing moves between lanes.
    """
    i = tl.arange(0, row.shape[0])
    inputs = first_input + i // 8 % WARPS * 32
    ptrs = ptr + (row.to(tl.int64) * stride_input + inputs)[:, None] + tl.arange(0, 32)[None, :]
    # Rows are dimensions 0 (eights) and 2; inputs are lanes, and then steps, halves and pairs within a lane.
    x = tl.reshape(tl.load(ptrs), (row.shape[0] // (8 * WARPS), WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (1, 0, 2, 4, 5, 3, 6)), (WARPS, row.shape[0] // WARPS, 32))


@triton.jit
def linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    stride_input,
    num_outputs,
    num_tokens,
    is_partial,
    activates,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = x W^T + bias, or its GELU if it `activates`; or parts of the sum over inputs, in float32, if `is_partial`.

    Grid: (outputs / OUTPUTS, parts). x is [num_tokens, stride_input] of up to TOKENS, W [num_outputs, stride_input]. A
    part has 32 * WARPS * CHUNKS inputs, of which each warp takes 32 at a time; the first part has the bias. Parts are
    stored as [parts, num_tokens, num_outputs]. With OVERLAP, weights are read while the preceding kernel still runs.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first_output = tl.program_id(0) * OUTPUTS
    part = tl.program_id(1)
    first_input = part * (32 * WARPS * CHUNKS)
    rows = first_output + _row_of(OUTPUTS, WARPS)
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        inputs = first_input + chunk * (32 * WARPS)
        weights = weights + (_load_operand(weight_ptr, rows, inputs, stride_input, WARPS),)
    output = first_output + tl.arange(0, OUTPUTS)
    bias = tl.where(part == 0, tl.load(bias_ptr + output).to(tl.float32), 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    # The last token again in place of tokens that are not there.
    tokens = tl.minimum(_row_of(TOKENS, WARPS), num_tokens - 1)
    # All at once, so that the first product does not wait for one latency after the other.
    x = ()
    for chunk in tl.static_range(CHUNKS):
        x = x + (_load_operand(x_ptr, tokens, first_input + chunk * (32 * WARPS), stride_input, WARPS),)
    acc = tl.zeros((WARPS, OUTPUTS, TOKENS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        acc = tl.dot(weights[chunk], tl.trans(x[chunk], (0, 2, 1)), acc)
    total = tl.sum(acc, axis=0) + bias[:, None]  # [OUTPUTS, TOKENS]
    token = tl.arange(0, TOKENS)
    inside = (token < num_tokens)[None, :]
    place = token[None, :] * num_outputs + output[:, None]
    if is_partial != 0:
        tl.store(parts_ptr + part * (num_tokens * num_outputs) + place, total, mask=inside)
    else:
        if activates != 0:
            total = total * 0.5 * (1.0 + tl.erf(total * _INVERSE_SQRT2))
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
