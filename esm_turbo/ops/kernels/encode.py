"""Triton kernel that encodes a layer's keys and values. Imported only where it runs; docs/notes/kernels.md explains it.

A program takes the keys or the values of one head of one row, tile by tile. It rotates keys back by the first column
of their block, centres them, multiplies them with the map on the tensor cores, rounds them to codes, and writes the
fields of every slab. Three TF32 products (11 significant bits) make one of nearly float32 precision. The columns of the
map are in an order (`triton_encode.column_order`) in which a lane of the product's result holds neighbouring
components, so that codes are packed within lanes.

Where there are too few programs to fill a GPU, the tiles of a row are split between several. The last of them to
finish then sums their residuals, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of a profile's table: the widths, then the locations of fields of 8, 4, 2 and 1 bits.
_PROFILE_ROWS: tl.constexpr = tl.constexpr(5)
# Up to this size, registers have room for the inverse map while tiles are processed.
_MAX_EARLY_SIZE: tl.constexpr = tl.constexpr(64)
# Added to a smaller whole number, 2^23 puts it into the lowest bits of a float32.
_TWO_POW_23: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def _load_vectors(ptr, source, valid, d, in_head):
    """Vectors [T, d] in float32; zeros outside."""
    return tl.load(ptr + source[:, None] + d[None, :], mask=valid[:, None] & in_head[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_half_map(map_ptr, first, k, n, in_half, HEAD_DIM: tl.constexpr):
    """Rows of a map from `first` on, [K, N]. In memory it is transposed, [N, HEAD_DIM], as the tensor cores read it."""
    return tl.load(map_ptr + n[None, :] * HEAD_DIM + (first + k)[:, None], mask=in_half[:, None], other=0.0)


@triton.jit
def _dot_tf32x3(x, rounded, rest, acc):
    """acc + x map, where the map is given rounded to TF32 and as the rest; x is split likewise."""
    # Rounded by hand: the tensor cores would truncate.
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    x_rounded = bits.to(tl.float32, bitcast=True)
    # Infinities enter the main product alone: the others would turn them into NaN.
    finite = tl.abs(x_rounded) < float("inf")
    acc = tl.dot(tl.where(finite, x - x_rounded, 0.0), rounded, acc, input_precision="tf32")
    acc = tl.dot(tl.where(finite, x_rounded, 0.0), rest, acc, input_precision="tf32")
    return tl.dot(x_rounded, rounded, acc, input_precision="tf32")


@triton.jit
def _to_component_order(x, T: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """The product [T, N] with a map whose columns are in `column_order`, in the order of components."""
    x = tl.permute(tl.reshape(x, (T, PARTS, N // (8 * PARTS), 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (T, N))


@triton.jit
def _load_transformed(
    x_ptr,
    source,
    valid,
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
    """T vectors rotated back, centred and mapped, [T, N], in the order of components.

    Vectors and maps are processed in the halves that RoPE pairs. Without `angle_ptr` nothing is rotated. Without maps,
    vectors are loaded whole, and neither mapped nor centred.
    """
    x = _load_vectors(x_ptr, source, valid, k, in_half)  # [T, K]
    if len(maps) == 0:
        return x
    else:
        upper = _load_vectors(x_ptr + HEAD_DIM // 2, source, valid, k, in_half)
        if angle_ptr is not None:
            cos = tl.load(angle_ptr + k, mask=in_half, other=0.0)[None, :]  # [1, K]
            sin = tl.load(angle_ptr + HEAD_DIM // 2 + k, mask=in_half, other=0.0)[None, :]
            rotated = x * cos + upper * sin
            upper = upper * cos - x * sin
            x = rotated
        acc = tl.zeros((T, N), tl.float32)
        acc = _dot_tf32x3(x - mean[None, :], maps[0], maps[1], acc)
        acc = _dot_tf32x3(upper - upper_mean[None, :], maps[2], maps[3], acc)
        return _to_component_order(acc, T, N, PARTS)


@triton.jit
def _uniform_codes(x, highest):
    """Codes of components [T, groups, 8] on a uniform grid, as float32: ceil(x) + 2^(width - 1) - 1, clamped.

    The boundaries between codes are the whole numbers; a number on a boundary has the lower code, NaN has code 0.
    """
    code = tl.ceil(x) + (0.5 * (highest + 1.0) - 1.0)
    # Not tl.maximum: NaN must become 0.
    return tl.minimum(tl.where(code > 0.0, code, 0.0), highest)


@triton.jit
def _table_codes(x, levels_ptr, LEVELS: tl.constexpr):
    """Codes of x in a table of levels, as float32; with eight levels the sign of the residual is the fourth bit."""
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
def _squeeze(word, BITS: tl.constexpr):
    """The lowest BITS bits of a word's four bytes, next to each other, lowest byte first."""
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
def _store_fields(codes_ptr, low, high, width, location, row, valid, padded_tokens, BITS: tl.constexpr):
    """Writes the fields of BITS bits of codes, given as two words of four codes each, [T, groups].

    `location` packs three numbers, see `triton_encode.profile`: bytes per token in the slabs before, the group's first
    byte in its slab, and bytes per token in the slab.
    """
    before = (location >> 20).to(tl.int64)
    field_ptrs = codes_ptr + (before * padded_tokens + ((location >> 10) & 1023))[None, :]
    field_ptrs = field_ptrs + row[:, None] * (location & 1023)[None, :]  # [T, groups]
    mask = valid[:, None] & ((width & BITS) != 0)[None, :]
    if BITS == 8:
        both = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        tl.store(field_ptrs.to(tl.pointer_type(tl.int64), bitcast=True), both, mask=mask)
    else:
        shift = (width & (BITS - 1))[None, :]
        fields = _squeeze(low >> shift, BITS) | (_squeeze(high >> shift, BITS) << (4 * BITS))
        if BITS == 4:
            tl.store(field_ptrs.to(tl.pointer_type(tl.int32), bitcast=True), fields, mask=mask)
        elif BITS == 2:
            tl.store(field_ptrs.to(tl.pointer_type(tl.int16), bitcast=True), fields.to(tl.int16), mask=mask)
        else:
            tl.store(field_ptrs.to(tl.pointer_type(tl.int8), bitcast=True), fields.to(tl.int8), mask=mask)


@triton.jit
def _store_codes(
    codes_ptr,
    codes,
    width,
    locations,
    row,
    valid,
    padded_tokens,
    FIELDS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Writes codes [T, G, 8], as float32, to all slabs of a profile; FIELDS is the union of the widths of fields."""
    weights = (1 << (tl.arange(0, 2) * 8)).to(tl.float32)
    # Two codes make a number of 16 bits, which float32 holds exactly.
    pairs = tl.sum(tl.reshape(codes, (T, G, 2, 2, 2)) * weights[None, None, None, None, :], 4)
    pairs = (pairs + _TWO_POW_23).to(tl.int32, bitcast=True) & 0xFFFF
    words = tl.sum(pairs << (tl.arange(0, 2) * 16)[None, None, None, :], 3)
    low, high = tl.split(words)
    if FIELDS & 8:
        _store_fields(codes_ptr, low, high, width, locations[0], row, valid, padded_tokens, 8)
    if FIELDS & 4:
        _store_fields(codes_ptr, low, high, width, locations[1], row, valid, padded_tokens, 4)
    if FIELDS & 2:
        _store_fields(codes_ptr, low, high, width, locations[2], row, valid, padded_tokens, 2)
    if FIELDS & 1:
        _store_fields(codes_ptr, low, high, width, locations[3], row, valid, padded_tokens, 1)


@triton.jit
def _store_residual(mean, inverse, residual_ptr, n, in_head):
    """Writes a mean residual in the model's coordinates, where a reader adds it to the codec's means."""
    tl.store(residual_ptr + n, tl.sum(inverse * mean[None, :], 1).to(tl.bfloat16), mask=in_head)


@triton.jit(do_not_specialize_on_alignment=["order_ptr", "start_ptr", "count_ptr", "protected_ptr", "counter_ptr"])
def encode_context(
    x_ptrs,
    order_ptr,
    start_ptr,
    count_ptr,
    protected_ptr,
    map_ptrs,
    mean_ptrs,
    inverse_ptrs,
    levels_ptrs,
    angle_ptr,
    profile_ptr,
    codes_ptr,
    residual_ptr,
    special_ptr,
    partial_ptr,
    counter_ptr,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    num_tokens,
    num_blocks,
    padded_tokens,
    num_slots,
    has_order,
    has_start,
    has_count,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    MAPPED: tl.constexpr,
    FIELDS: tl.constexpr,
    LEVELS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Encodes a layer's keys and values; arguments in pairs are of keys and of values.

    For a vector x in a block that begins at column b, and a component of w bits:

        z    = T (R(-b) x - mean)
        code = clamp(ceil(z) + 2^(w - 1) - 1, 0, 2^w - 1), or the nearest level of a table

    With RESIDUAL, it also stores the mean over tokens of T^-1 (z - dequantised code).

    Order, start and count are read if there are any. Of each row, `num_slots` tokens are protected, up to SLOTS.

    Grid: (splits, 2 x heads, rows); even programs of the second dimension take keys, odd ones values. The slabs
    follow one another in `codes_ptr`, each with room for `padded_tokens` tokens of a head. With OVERLAP, maps are
    loaded while the preceding kernel may still run, and the next kernel may begin likewise.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    G: tl.constexpr = N // 8
    half: tl.constexpr = HEAD_DIM // 2
    early: tl.constexpr = RESIDUAL and N <= _MAX_EARLY_SIZE
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    num_heads = tl.num_programs(1) // 2
    head = tl.program_id(1) // 2
    batch = tl.program_id(2).to(tl.int64)
    row_head = batch * num_heads + head
    n = tl.arange(0, N)
    g = tl.arange(0, G)
    in_head = n < HEAD_DIM
    for kind in tl.static_range(2):
        if tl.program_id(1) % 2 == kind:
            # Among the outputs of keys, which those of values follow.
            output = kind * tl.num_programs(2) * num_heads + row_head
            mapped: tl.constexpr = MAPPED[kind]
            k = tl.arange(0, HALF if mapped else N)
            in_half = k < (half if mapped else HEAD_DIM)

            # All inputs are loaded at once, first those that no kernel writes.
            mean = tl.load(mean_ptrs[kind] + head * HEAD_DIM + k, mask=in_half, other=0.0)  # [K]
            upper_mean = mean
            maps = ()
            if mapped:
                map_ptr = map_ptrs[kind] + head * (2 * HEAD_DIM * N)
                rounded = _load_half_map(map_ptr, 0, k, n, in_half, HEAD_DIM)  # [K, N]
                rest = _load_half_map(map_ptr + N * HEAD_DIM, 0, k, n, in_half, HEAD_DIM)
                upper_mean = tl.load(mean_ptrs[kind] + head * HEAD_DIM + half + k, mask=in_half, other=0.0)
                upper_rounded = _load_half_map(map_ptr, half, k, n, in_half, HEAD_DIM)
                upper_rest = _load_half_map(map_ptr + N * HEAD_DIM, half, k, n, in_half, HEAD_DIM)
                maps = (rounded, rest, upper_rounded, upper_rest)
            profile_ptrs = profile_ptr + kind * (_PROFILE_ROWS * G) + g
            width = tl.load(profile_ptrs)  # [G]
            locations = ()
            for profile_row in tl.static_range(1, _PROFILE_ROWS):
                locations = locations + (tl.load(profile_ptrs + profile_row * G),)
            inverse_ptr = inverse_ptrs[kind] + head * (HEAD_DIM * HEAD_DIM) + n[:, None] * HEAD_DIM + n[None, :]
            inside = in_head[:, None] & in_head[None, :]
            if early:
                inverse = tl.load(inverse_ptr, mask=inside, other=0.0)  # [N, N]
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            begin = 0
            if kind == 0:
                begin = tl.load(start_ptr + batch, mask=has_start != 0, other=0).to(tl.int32)
            num_kept = num_tokens
            if has_count != 0:
                num_kept = tl.load(count_ptr + batch).to(tl.int32)
            # Protected tokens are not read from their codes; -1 for an empty slot.
            num_read = num_kept
            protected = ()
            for slot in tl.static_range(SLOTS):
                slot_ptr = protected_ptr + batch * num_slots + slot
                protected = protected + (tl.load(slot_ptr, mask=slot < num_slots, other=-1).to(tl.int32),)
                num_read -= (protected[slot] >= 0).to(tl.int32)

            x_ptr = x_ptrs[kind] + (
                batch * stride_kb + head * stride_kh if kind == 0 else batch * stride_vb + head * stride_vh
            )
            highest = ((1 << width) - 1).to(tl.float32)[None, :, None]
            # Tiles are aligned to columns, so that none crosses the boundary of a block.
            lead = begin % T
            tiles = tl.cdiv(lead + num_tokens, T)
            residual = tl.zeros((T, G, 8), tl.float32)
            for tile in tl.range(split, tiles + tl.minimum(num_slots, 1), splits, disable_licm=True):
                t = tl.arange(0, T)
                token = tile * T - lead + t
                block = (begin - lead + tile * T) // BLOCK
                valid = (token >= 0) & (token < num_tokens)
                # The last tile holds the protected tokens.
                is_last = tile == tiles
                coded = valid & (tile < tiles)
                is_slot = is_last & (t < num_slots)
                valid = coded | is_slot
                slot_ptrs = protected_ptr + batch * num_slots + t
                slot_token = tl.maximum(tl.load(slot_ptrs, mask=is_slot, other=0), 0)
                token = tl.where(is_last, slot_token.to(tl.int32), token)
                # Relative to the first block, whatever their columns, so that one mapped query serves all of them.
                block = tl.where(is_last, 0, block)
                tile_angle_ptr = angle_ptr if kind == 0 else None
                if tile_angle_ptr is not None:
                    # Blocks beyond the end of the table have no valid tokens.
                    tile_angle_ptr += tl.minimum(block, num_blocks - 1) * HEAD_DIM
                source = token.to(tl.int64)
                if has_order != 0:
                    source = tl.load(order_ptr + batch * num_tokens + token, mask=valid, other=0)
                source *= stride_kn if kind == 0 else stride_vn
                x = _load_transformed(
                    x_ptr, source, valid, tile_angle_ptr, mean, upper_mean, maps, k, in_half, HEAD_DIM, N, T, PARTS
                )  # [T, N]
                if is_last:
                    special_ptrs = special_ptr + (output * num_slots + t[:, None]) * HEAD_DIM + n[None, :]
                    tl.store(special_ptrs, x.to(tl.bfloat16), mask=is_slot[:, None] & in_head[None, :])
                x = tl.reshape(x, (T, G, 8))
                if LEVELS > 0:
                    codes = _table_codes(x, levels_ptrs[kind] + head * LEVELS, LEVELS)
                else:
                    codes = _uniform_codes(x, highest)
                    if RESIDUAL:
                        read = coded & (token < num_kept)
                        for slot in tl.static_range(SLOTS):
                            read = read & (token != protected[slot])
                        residual += tl.where(read[:, None, None], x - (codes - 0.5 * highest), 0.0)
                row = row_head * num_tokens + token
                _store_codes(codes_ptr, codes, width, locations, row, coded, padded_tokens, FIELDS[kind], T, G)

            if RESIDUAL:
                total = tl.sum(tl.reshape(residual, (T, N)), 0)  # [N]
                num_read = tl.maximum(num_read, 1).to(tl.float32)
                if not early:
                    inverse = tl.load(inverse_ptr, mask=inside, other=0.0)
                if splits == 1:
                    _store_residual(total / num_read, inverse, residual_ptr + output * HEAD_DIM, n, in_head)
                else:
                    partial_ptrs = partial_ptr + output * (splits * N) + n
                    tl.store(partial_ptrs + split * N, total)
                    tl.debug_barrier()
                    if tl.atomic_add(counter_ptr + output, 1, sem="acq_rel", scope="gpu") == splits - 1:
                        # Back to zero, for the next launch.
                        tl.store(counter_ptr + output, 0)
                        total = tl.zeros((N,), tl.float32)
                        for i in range(splits):
                            total += tl.load(partial_ptrs + i * N, cache_modifier=".cg")
                        _store_residual(total / num_read, inverse, residual_ptr + output * HEAD_DIM, n, in_head)
