"""Triton kernel that encodes a layer's keys and values. Imported only where it runs; docs/kernels.md draws it.

A program takes one head's keys or values of one row, tile by tile: turns keys back by the first column of their block,
centres them, multiplies them with the map on the tensor cores, counts boundaries, and writes the fields of every slab.
Three products of numbers of eleven bits (TF32) make one that is nearly float32's. The columns of the map come in an
order (`triton_encode.column_order`) in which a lane of the product's result holds neighbouring components, so that
codes are packed inside of lanes.

Where few programs would leave a GPU idle, a row's tiles are shared out among several. The mean of what quantisation
left is then joined by the last of them to finish, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of a profile's table: the widths, then where fields of 8, 4, 2 and 1 bits stand.
_TABLE_ROWS: tl.constexpr = tl.constexpr(5)
# Up to here there are registers for one more matrix while tiles are worked on.
_EARLY: tl.constexpr = tl.constexpr(64)
# Added to a whole number below it, this puts the number into the lowest bits.
_WHOLE: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def _vectors(ptr, source, there, d, in_head):
    """Vectors [tokens, d] in float32; zeros for what is not there."""
    return tl.load(ptr + source[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0).to(tl.float32)


@triton.jit
def _half_map(map_ptr, first, k, n, in_half, HEAD_DIM: tl.constexpr):
    """Rows of a map, from the first on, [K, N]; in memory transposed, [N, HEAD_DIM], as the tensor cores want it."""
    return tl.load(map_ptr + n[None, :] * HEAD_DIM + (first + k)[:, None], mask=in_half[:, None], other=0.0)


@triton.jit
def _added_product(total, x, rounded, rest):
    """Adds x times a map, which comes rounded to TF32 and with the rest, and rounds x likewise."""
    # Rounded by hand: the tensor cores would cut off.
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    x_rounded = bits.to(tl.float32, bitcast=True)
    # The main product alone says what becomes of infinities: the others would make NaN of them.
    finite = tl.abs(x_rounded) < float("inf")
    total = tl.dot(tl.where(finite, x - x_rounded, 0.0), rounded, total, input_precision="tf32")
    total = tl.dot(tl.where(finite, x_rounded, 0.0), rest, total, input_precision="tf32")
    return tl.dot(x_rounded, rounded, total, input_precision="tf32")


@triton.jit
def _by_component(x, T: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """A product [T, N] with a map whose columns stand in `column_order`, in order of components."""
    x = tl.permute(tl.reshape(x, (T, PARTS, N // (8 * PARTS), 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (T, N))


@triton.jit
def _transformed(
    x_ptr,
    source,
    there,
    angle_ptr,
    mean,
    upper_mean,
    maps,
    k,
    in_half,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What is stored of T vectors, in order of components, [T, N]: turned back, centred and mapped.

    Vectors come in the halves that RoPE pairs, and so do the maps. Where there are no angles, nothing is turned; where
    there are no maps, vectors come whole, and nothing is mapped or centred.
    """
    x = _vectors(x_ptr, source, there, k, in_half)
    if len(maps) == 0:
        return x
    else:
        upper = _vectors(x_ptr + HEAD_DIM // 2, source, there, k, in_half)
        if angle_ptr is not None:
            cos = tl.load(angle_ptr + k, mask=in_half, other=0.0)[None, :]
            sin = tl.load(angle_ptr + HEAD_DIM // 2 + k, mask=in_half, other=0.0)[None, :]
            turned = x * cos + upper * sin
            upper = upper * cos - x * sin
            x = turned
        total = tl.zeros((T, N), tl.float32)
        total = _added_product(total, x - mean[None, :], maps[0], maps[1])
        total = _added_product(total, upper - upper_mean[None, :], maps[2], maps[3])
        return _by_component(total, T, N, PARTS)


@triton.jit
def _counted(x, highest):
    """Codes of components [T, groups, 8], as float32: how many of the whole numbers between codes lie below."""
    counted = tl.ceil(x) + (0.5 * (highest + 1.0) - 1.0)
    # Not tl.maximum: NaN is below all.
    return tl.minimum(tl.where(counted > 0.0, counted, 0.0), highest)


@triton.jit
def _looked_up(x, levels_ptr, LEVELS: tl.constexpr):
    """Codes of x in a table of levels, as float32; with eight levels the sign of what is left is the fourth bit."""
    level = tl.load(levels_ptr)
    code = tl.zeros_like(x)
    nearest = tl.zeros_like(x) + level
    for i in tl.static_range(1, LEVELS):
        following = tl.load(levels_ptr + i)
        above = x > (level + following) / 2
        code = tl.where(above, float(i), code)
        nearest = tl.where(above, following, nearest)
        level = following
    if LEVELS == 8:
        code = tl.where(x - nearest > 0, code + 8.0, code)
    return code


@triton.jit
def _squeezed(word, BITS: tl.constexpr):
    """The lowest BITS bits of a word's four bytes, next to each other; the lowest byte's are the lowest."""
    if BITS == 4:
        word = word & 0x0F0F0F0F
        word = (word | (word >> 4)) & 0x00FF00FF
        return (word | (word >> 8)) & 0xFFFF
    elif BITS == 2:
        word = word & 0x03030303
        word = (word | (word >> 6)) & 0x000F000F
        return (word | (word >> 12)) & 0xFF
    else:
        word = word & 0x01010101
        word = word | (word >> 7)
        return (word | (word >> 14)) & 0xF


@triton.jit
def _store_digit(codes_ptr, low, high, width, where, row, there, padded, BITS: tl.constexpr):
    """Writes the fields of BITS bits of codes, eight codes [T, groups] in two words."""
    before = (where >> 20).to(tl.int64)
    at = codes_ptr + (before * padded + ((where >> 10) & 1023))[None, :] + row[:, None] * (where & 1023)[None, :]
    mask = there[:, None] & ((width & BITS) != 0)[None, :]
    if BITS == 8:
        both = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        tl.store(at.to(tl.pointer_type(tl.int64), bitcast=True), both, mask=mask)
    else:
        shift = (width & (BITS - 1))[None, :]
        fields = _squeezed(low >> shift, BITS) | (_squeezed(high >> shift, BITS) << (4 * BITS))
        if BITS == 4:
            tl.store(at.to(tl.pointer_type(tl.int32), bitcast=True), fields, mask=mask)
        elif BITS == 2:
            tl.store(at.to(tl.pointer_type(tl.int16), bitcast=True), fields.to(tl.int16), mask=mask)
        else:
            tl.store(at.to(tl.pointer_type(tl.int8), bitcast=True), fields.to(tl.int8), mask=mask)


@triton.jit
def _store_codes(
    codes_ptr, codes, width, where, row, there, padded, DIGITS: tl.constexpr, T: tl.constexpr, G: tl.constexpr
):
    """Writes codes [T, G, 8], as float32, to all slabs of a profile; DIGITS joins the digits of its widths."""
    weights = (1 << (tl.arange(0, 2) * 8)).to(tl.float32)
    # Two codes are a number of sixteen bits.
    pairs = tl.sum(tl.reshape(codes, (T, G, 2, 2, 2)) * weights[None, None, None, None, :], 4)
    pairs = (pairs + _WHOLE).to(tl.int32, bitcast=True) & 0xFFFF
    words = tl.sum(pairs << (tl.arange(0, 2) * 16)[None, None, None, :], 3)
    low, high = tl.split(words)
    if DIGITS & 8:
        _store_digit(codes_ptr, low, high, width, where[0], row, there, padded, 8)
    if DIGITS & 4:
        _store_digit(codes_ptr, low, high, width, where[1], row, there, padded, 4)
    if DIGITS & 2:
        _store_digit(codes_ptr, low, high, width, where[2], row, there, padded, 2)
    if DIGITS & 1:
        _store_digit(codes_ptr, low, high, width, where[3], row, there, padded, 1)


@triton.jit
def _source(order_ptr, token, there, stride_token):
    """Where ordered tokens of a row stand."""
    source = token.to(tl.int64)
    if order_ptr is not None:
        source = tl.load(order_ptr + token, mask=there, other=0)
    return source * stride_token


@triton.jit
def _hidden(protected_ptr, SLOTS: tl.constexpr):
    """Protected tokens, -1 for none, which are not read from their codes."""
    hidden = ()
    for i in tl.static_range(SLOTS):
        hidden = hidden + (tl.load(protected_ptr + i).to(tl.int32),)
    return hidden


@triton.jit
def _read(token, there, hidden):
    read = there
    for i in tl.static_range(len(hidden)):
        read = read & (token != hidden[i])
    return read


@triton.jit
def _num_read(num_kept, hidden):
    for i in tl.static_range(len(hidden)):
        num_kept -= (hidden[i] >= 0).to(tl.int32)
    return tl.maximum(num_kept, 1).to(tl.float32)


@triton.jit
def _store_residual(mean, inverse, residual_ptr, n, in_head):
    """Writes a mean in the model's coordinates, where a reader adds it to the means that it knows anyway."""
    tl.store(residual_ptr + n, tl.sum(inverse * mean[None, :], 1).to(tl.bfloat16), mask=in_head)


@triton.jit
def _encode(
    x_ptr,
    stride_token,
    order_ptr,
    start_ptr,
    counts_ptr,
    protected_ptr,
    map_ptr,
    mean_ptr,
    inverse_ptr,
    levels_ptr,
    angle_ptr,
    table_ptr,
    codes_ptr,
    residual_ptr,
    special_ptr,
    partial_ptr,
    counter_ptr,
    place,
    num_tokens,
    num_blocks,
    padded,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    MAPPED: tl.constexpr,
    DIGITS: tl.constexpr,
    LEVELS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One kind of one head of one row, or a split of it, see `encode_context`: pointers are to what is theirs."""
    G: tl.constexpr = N // 8
    half: tl.constexpr = HEAD_DIM // 2
    split = tl.program_id(0)
    n = tl.arange(0, N)
    g = tl.arange(0, G)
    k = tl.arange(0, K)
    in_head = n < HEAD_DIM
    in_half = k < (half if MAPPED else HEAD_DIM)

    # All that is known beforehand is asked for at once: first what no kernel writes.
    mean = tl.load(mean_ptr + k, mask=in_half, other=0.0)
    upper_mean = mean
    maps = ()
    if MAPPED:
        rounded = _half_map(map_ptr, 0, k, n, in_half, HEAD_DIM)
        rest = _half_map(map_ptr + N * HEAD_DIM, 0, k, n, in_half, HEAD_DIM)
        upper_mean = tl.load(mean_ptr + half + k, mask=in_half, other=0.0)
        upper_rounded = _half_map(map_ptr, half, k, n, in_half, HEAD_DIM)
        upper_rest = _half_map(map_ptr + N * HEAD_DIM, half, k, n, in_half, HEAD_DIM)
        maps = (rounded, rest, upper_rounded, upper_rest)
    width = tl.load(table_ptr + g)
    where = ()
    for digit in tl.static_range(4):
        where = where + (tl.load(table_ptr + (1 + digit) * G + g),)
    inverse_at = inverse_ptr + n[:, None] * HEAD_DIM + n[None, :]
    inside = in_head[:, None] & in_head[None, :]
    early: tl.constexpr = RESIDUAL and N <= _EARLY
    if early:
        inverse = tl.load(inverse_at, mask=inside, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    begin = 0
    if start_ptr is not None:
        begin = tl.load(start_ptr).to(tl.int32)
    num_kept = num_tokens
    if counts_ptr is not None:
        num_kept = tl.load(counts_ptr).to(tl.int32)
    hidden = _hidden(protected_ptr, SLOTS)

    highest = ((1 << width) - 1).to(tl.float32)[None, :, None]
    # A tile stands in one block of columns.
    lead = begin % T
    tiles = tl.cdiv(lead + num_tokens, T)
    left = tl.zeros((T, G, 8), tl.float32)
    for tile in tl.range(split, tiles + (SLOTS > 0), SPLITS, disable_licm=True):
        t = tl.arange(0, T)
        token = tile * T - lead + t
        block = (begin - lead + tile * T) // BLOCK
        there = (token >= 0) & (token < num_tokens)
        coded = there
        if SLOTS > 0:
            # The last tile holds the protected tokens.
            is_last = tile == tiles
            coded = there & (tile < tiles)
            there = coded | (is_last & (t < SLOTS))
            chosen = tl.maximum(tl.load(protected_ptr + t, mask=is_last & (t < SLOTS), other=0), 0)
            token = tl.where(is_last, chosen.to(tl.int32), token)
            # Relative to the first block, wherever they stand, so that one mapped query serves all of them.
            block = tl.where(is_last, 0, block)
        tile_angle_ptr = angle_ptr
        if tile_angle_ptr is not None:
            # Past the end of the table is nothing that is there.
            tile_angle_ptr += tl.minimum(block, num_blocks - 1) * HEAD_DIM
        x = _transformed(
            x_ptr, _source(order_ptr, token, there, stride_token), there, tile_angle_ptr, mean, upper_mean, maps,
            k, in_half, HEAD_DIM, N, T, PARTS,
        )  # fmt: skip
        if SLOTS > 0:  # noqa: SIM102 - known when compiled
            if is_last:
                at = special_ptr + t[:, None] * HEAD_DIM + n[None, :]
                tl.store(at, x.to(tl.bfloat16), mask=(t < SLOTS)[:, None] & in_head[None, :])
        x = tl.reshape(x, (T, G, 8))
        if LEVELS > 0:
            codes = _looked_up(x, levels_ptr, LEVELS)
        else:
            codes = _counted(x, highest)
            if RESIDUAL:
                read = _read(token, coded & (token < num_kept), hidden)
                left += tl.where(read[:, None, None], x - (codes - 0.5 * highest), 0.0)
        row = place * num_tokens + token
        _store_codes(codes_ptr, codes, width, where, row, coded, padded, DIGITS, T, G)

    if RESIDUAL:
        total = tl.sum(tl.reshape(left, (T, N)), 0)
        num_read = _num_read(num_kept, hidden)
        if not early:
            inverse = tl.load(inverse_at, mask=inside, other=0.0)
        if SPLITS == 1:
            _store_residual(total / num_read, inverse, residual_ptr, n, in_head)
        else:
            tl.store(partial_ptr + split * N + n, total)
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                # As it was found, for the next launch.
                tl.store(counter_ptr, 0)
                total = tl.zeros((N,), tl.float32)
                for i in range(SPLITS):
                    total += tl.load(partial_ptr + i * N + n, cache_modifier=".cg")
                _store_residual(total / num_read, inverse, residual_ptr, n, in_head)


@triton.jit
def encode_context(
    key_ptr,
    value_ptr,
    order_ptr,
    start_ptr,
    counts_ptr,
    protected_ptr,
    key_map_ptr,
    value_map_ptr,
    key_mean_ptr,
    value_mean_ptr,
    key_inverse_ptr,
    value_inverse_ptr,
    key_levels_ptr,
    value_levels_ptr,
    angle_ptr,
    table_ptr,
    codes_ptr,
    residual_ptr,
    special_ptr,
    partial_ptr,
    counter_ptr,
    stride_key_row,
    stride_key_head,
    stride_key_token,
    stride_value_row,
    stride_value_head,
    stride_value_token,
    num_tokens,
    num_blocks,
    padded,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    KEY_MAPPED: tl.constexpr,
    VALUE_MAPPED: tl.constexpr,
    KEY_DIGITS: tl.constexpr,
    VALUE_DIGITS: tl.constexpr,
    LEVELS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Encodes a layer's keys and values. Grid: (splits, 2 x heads, rows); keys and values take turns.

    The slabs lie one after the other in `codes_ptr`, each as if there were `padded` tokens of a head. With OVERLAP,
    maps are loaded while the kernel before may still run, and the next one may begin likewise.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    num_heads = tl.num_programs(1) // 2
    kind = tl.program_id(1) % 2
    head = tl.program_id(1) // 2
    batch = tl.program_id(2).to(tl.int64)
    place = batch * num_heads + head
    if order_ptr is not None:
        order_ptr += batch * num_tokens
    if start_ptr is not None:
        start_ptr += batch
    if counts_ptr is not None:
        counts_ptr += batch
    if SLOTS > 0:
        protected_ptr += batch * SLOTS
    if kind == 0:
        _encode(
            key_ptr + batch * stride_key_row + head * stride_key_head,
            stride_key_token,
            order_ptr,
            start_ptr,
            counts_ptr,
            protected_ptr,
            key_map_ptr + head * (2 * HEAD_DIM * N),
            key_mean_ptr + head * HEAD_DIM,
            key_inverse_ptr + head * (HEAD_DIM * HEAD_DIM),
            key_levels_ptr + head * LEVELS,
            angle_ptr,
            table_ptr,
            codes_ptr,
            residual_ptr + place * HEAD_DIM,
            special_ptr + place * (SLOTS * HEAD_DIM),
            partial_ptr + place * (SPLITS * N),
            counter_ptr + place,
            place,
            num_tokens,
            num_blocks,
            padded,
            HEAD_DIM,
            N,
            HALF if KEY_MAPPED else N,
            T,
            BLOCK,
            PARTS,
            SPLITS,
            SLOTS,
            KEY_MAPPED,
            KEY_DIGITS,
            LEVELS,
            RESIDUAL,
            OVERLAP,
        )
    else:
        value_place = tl.num_programs(2) * num_heads + place
        _encode(
            value_ptr + batch * stride_value_row + head * stride_value_head,
            stride_value_token,
            order_ptr,
            None,
            counts_ptr,
            protected_ptr,
            value_map_ptr + head * (2 * HEAD_DIM * N),
            value_mean_ptr + head * HEAD_DIM,
            value_inverse_ptr + head * (HEAD_DIM * HEAD_DIM),
            value_levels_ptr + head * LEVELS,
            None,
            table_ptr + _TABLE_ROWS * (N // 8),
            codes_ptr,
            residual_ptr + value_place * HEAD_DIM,
            special_ptr + value_place * (SLOTS * HEAD_DIM),
            partial_ptr + value_place * (SPLITS * N),
            counter_ptr + value_place,
            place,
            num_tokens,
            num_blocks,
            padded,
            HEAD_DIM,
            N,
            HALF if VALUE_MAPPED else N,
            T,
            BLOCK,
            PARTS,
            SPLITS,
            SLOTS,
            VALUE_MAPPED,
            VALUE_DIGITS,
            LEVELS,
            RESIDUAL,
            OVERLAP,
        )
