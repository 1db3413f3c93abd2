"""Triton kernels of the packed attention. Imported only where they run; docs/kernels.md draws what happens.

Two launches: `attend_context` maps the queries into the space of the stored keys and reads the context, split over
programs of one warp, and `merge` joins the splits with the new tokens and maps the output back.

Packed words become operands of `tl.dot` in registers: bytes are brought into place by twos, and a field is masked into
the mantissa of 1024 where it stands. The order of components in an operand follows from which field of which word a
lane holds (`kernel_layout`); it is undone in the maps of the query and of the output, which cost nothing more for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPERAND: tl.constexpr = tl.constexpr(16)
_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
# The least total that is not 0, and a normal number in float32: others would make Triton compute in float64.
_LEAST_TOTAL: tl.constexpr = tl.constexpr(2.0e-38)
# Likewise a small one that has an inverse.
_LEAST: tl.constexpr = tl.constexpr(1.0e-30)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _bytes(x, y, selector, ASM: tl.constexpr):
    """Four bytes of x (0 to 3) and y (4 to 7): those in the selector's lowest four digits of four bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        result = 0
        for i in tl.static_range(4):
            digit = selector >> 4 * i & 7
            result |= (tl.where(digit < 4, x, y) >> (digit % 4 * 8) & 0xFF) << 8 * i
        return result


@triton.jit
def _in_lanes(x, ASM: tl.constexpr):
    """x, as if every lane had its own: `prmt` takes one operand of those that all have alike, and others are moved."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %laneid; or.b32 t, t, 32; bfind.u32 t, t; sub.u32 t, t, 5; or.b32 $0, $1, t; }",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return x


@triton.jit
def _table(table_ptr, SLABS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes of 16 numbers of half precision, by fours: the first eight's lower and upper ones, then the others'.

    Empty where nothing is looked up, or in float32.
    """
    table = ()
    if SLABS[0][5] and tl.float16 == DTYPE:
        words = table_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(0, 8, 4):
            a, b = tl.load(words + i), tl.load(words + i + 1)
            c, d = tl.load(words + i + 2), tl.load(words + i + 3)
            for selector in tl.static_range(0x6420, 0x7531 + 1, 0x1111):
                table = table + (_in_lanes(_bytes(a, b, selector, ASM), ASM),)
                table = table + (_in_lanes(_bytes(c, d, selector, ASM), ASM),)
    return table


@triton.jit
def _looked_up(word, table, ASM: tl.constexpr):
    """What a table holds at the eight fields of a word: of bytes 0 and 2, and of bytes 1 and 3, four pairs.

    A pair is the same field of the lower and of the upper byte of either two, in half precision.
    """
    index = word & 0x77777777
    upper = word >> 3 & 0x11111111
    ones = _in_lanes(tl.zeros_like(table[0]) + 0xFF00, ASM)
    pairs = ()
    for _ in tl.static_range(2):
        # Bytes of ones for fields above seven.
        above = _bytes(ones, ones, upper, ASM)
        low = _bytes(table[0], table[1], index, ASM) & ~above | _bytes(table[4], table[5], index, ASM) & above
        high = _bytes(table[2], table[3], index, ASM) & ~above | _bytes(table[6], table[7], index, ASM) & above
        for selector in tl.static_range(0x6240, 0x7351 + 1, 0x1111):
            pair = _bytes(low, high, selector, ASM)
            one = pair.to(tl.int16).to(tl.float16, bitcast=True)
            other = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            pairs = pairs + ((one, other),)
        index = index >> 16
        upper = upper >> 16
    return pairs


@triton.jit
def _pair(
    w,
    table_ptr,
    shift,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    CENTRED: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """The fields of byte 0 and byte 2 of words that begin at bits LOW and HIGH, and shift, of these bytes.

    A field stays where it is in its byte: it counts 2^(its bit) times, which is in the maps (`kernel_layout`). Centred,
    2^(BITS - 1) is taken off a field; otherwise 1024 is added to half precision where `ASM`.
    """
    mask: tl.constexpr = 2**BITS - 1
    if TABLE:
        low = tl.load(table_ptr + ((w >> (LOW + shift)) & mask))
        high = tl.load(table_ptr + ((w >> (16 + HIGH + shift)) & mask))
        return low.to(DTYPE), high.to(DTYPE)
    else:
        ones: tl.constexpr = 2**LOW + 2 ** (16 + HIGH)
        fields = (mask * ones) << shift
        middles = (2 ** (BITS - 1) * ones) << shift
        if ASM and tl.float16 == DTYPE:
            # 1024, 0x6400 in half precision, has ten bits of mantissa free: (w & fields) | 1024, twice in a word.
            if CENTRED:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; lop3.b32 t, $2, $3, $4, 0xEA; sub.f16x2 t, t, $5; mov.b32 {$0, $1}, t; }",
                    "=h,=h,r,r,r,r",
                    [w, fields, 0x64006400, 0x64006400 + middles],
                    dtype=(tl.float16, tl.float16),
                    is_pure=True,
                    pack=1,
                )
            else:
                return tl.inline_asm_elementwise(
                    "{ .reg .b32 t; lop3.b32 t, $2, $3, $4, 0xEA; mov.b32 {$0, $1}, t; }",
                    "=h,=h,r,r,r",
                    [w, fields, 0x64006400],
                    dtype=(tl.float16, tl.float16),
                    is_pure=True,
                    pack=1,
                )
        else:
            w = w & fields
            if CENTRED:
                low, high = (w & 0xFFFF) - (middles & 0xFFFF), (w >> 16) - (middles >> 16)
            else:
                low, high = w & 0xFFFF, w >> 16
            return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _stacked(parts):
    """Joins 1, 2, 4, 8 or 16 tensors along new last dimensions of two, the lowest bit of the part's number first."""
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return tl.join(parts[0], parts[1])
    else:
        half: tl.constexpr = len(parts) // 2
        return tl.join(_stacked(parts[:half]), _stacked(parts[half:]))


@triton.jit
def _first_loaded(tile, columns, T: tl.constexpr):
    """The first column that is loaded for a tile: its own, or, so that no load needs a mask, of the context's last T.

    A context shorter than a tile is loaded from its first on.
    """
    return tl.maximum(tl.minimum(tile * T, columns - T), 0)


@triton.jit
def _value_elements(
    slab_ptr, row, first, columns, T: tl.constexpr, SHORT: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr
):
    """The words of T values, [T, words]."""
    words: tl.constexpr = SLABS[SLAB][1]
    stored: tl.constexpr = SLABS[SLAB][6]
    token = tl.arange(0, T)[:, None]
    word = tl.arange(0, words)[None, :]
    mask = None
    if SHORT:
        mask = token < columns
    if stored < words:
        mask = (word < stored) if mask is None else mask & (word < stored)
    return tl.load(slab_ptr + (row + first) * stored + (token * stored + word), mask=mask)


@triton.jit
def _key_operand(
    x,
    table_ptr,
    table,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Components of T keys from their elements, [size, T]. A lane holds four components of a key in a row."""
    bits: tl.constexpr = SLABS[SLAB][0]
    words: tl.constexpr = SLABS[SLAB][1]
    elements: tl.constexpr = SLABS[SLAB][2]
    element_bits: tl.constexpr = SLABS[SLAB][3]
    size: tl.constexpr = SLABS[SLAB][4]
    count: tl.constexpr = element_bits // bits // 2
    upper: tl.constexpr = count if element_bits <= 8 else 0
    x = x.to(tl.int32)
    shift = 0
    if element_bits < 32:
        # The bytes of the element's halves, or the byte that has both.
        bit = (tl.arange(0, 4) % (elements // words) * element_bits)[:, None, None, None]
        if element_bits < 8:
            shift = bit % 8
        x = _bytes(x, x, bit // 8 * 0x0101 + (0x0100 if element_bits == 16 else 0), ASM)
    parts = ()
    if len(table) > 0 and element_bits == 32:
        # Bytes 0 and 2, 1 and 3: the same of either half.
        pairs = _looked_up(_bytes(x, x, 0x3120, ASM), table, ASM)
        for i in tl.static_range(count):
            parts = parts + (tl.join(pairs[i][0], pairs[i][1]),)
    else:
        for i in tl.static_range(count):
            pair = x >> (bits * i // 8 * 8)
            one, other = _pair(
                pair, table_ptr, shift, bits * i % 8, bits * (i + upper) % 8, bits, SLABS[SLAB][5], False, DTYPE, ASM
            )
            parts = parts + (tl.join(one, other),)
    stacked = _stacked(parts)
    # One pair of fields an element leaves every other pair of places empty.
    empty: tl.constexpr = count == 1 and size > 2 * elements
    if empty:
        stacked = tl.join(stacked, tl.zeros_like(stacked))
    if count == 1 and not empty:
        order: tl.constexpr = (3, 0, 4)
    elif count <= 2:
        order: tl.constexpr = (3, 0, 5, 4)
    elif count == 4:
        order: tl.constexpr = (6, 3, 0, 5, 4)
    elif count == 8:
        order: tl.constexpr = (7, 6, 3, 0, 5, 4)
    else:
        order: tl.constexpr = (8, 7, 6, 3, 0, 5, 4)
    places: tl.constexpr = 2 * count * elements * (2 if empty else 1)
    # As they are multiplied, for a transposition would move them.
    if ROWS < OPERAND:
        return tl.trans(_padded(tl.reshape(tl.permute(stacked, (2, 1) + order), (T, places)), T, places, size))
    else:
        operand = tl.reshape(tl.permute(stacked, () + order + (2, 1)), (places, T))
        if places < size:
            operand = tl.reshape(tl.permute(tl.join(operand, tl.zeros_like(operand)), (2, 0, 1)), (size, T))
        return operand


@triton.jit
def _value_operand(
    x,
    table_ptr,
    table,
    T: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Components of T values from their words, [T, size].

    Eight lanes share a value; two neighbouring tokens fill a register.
    """
    bits: tl.constexpr = SLABS[SLAB][0]
    words: tl.constexpr = SLABS[SLAB][1]
    elements: tl.constexpr = SLABS[SLAB][2]
    element_bits: tl.constexpr = SLABS[SLAB][3]
    size: tl.constexpr = SLABS[SLAB][4]
    shared: tl.constexpr = elements // words
    count: tl.constexpr = element_bits // bits
    each: tl.constexpr = 8 // bits if element_bits > 8 else count
    even, odd = tl.split(tl.permute(tl.reshape(x, (T // 2, 2, words)), (0, 2, 1)))
    x = even.to(tl.int32)[:, :, None]
    y = odd.to(tl.int32)[:, :, None]
    bit = (tl.arange(0, shared) * element_bits)[None, None, :]
    shift = bit % 8 if element_bits < 8 else 0
    parts = ()
    if len(table) > 0 and element_bits == 32:
        # Bytes of either token take turns.
        pairs = _looked_up(_bytes(x, y, 0x5140, ASM), table, ASM)
        pairs = pairs + _looked_up(_bytes(x, y, 0x7362, ASM), table, ASM)
        for i in tl.static_range(count):
            parts = parts + (tl.reshape(tl.join(pairs[i][0], pairs[i][1]), (T // 2, elements, 2)),)
    else:
        for i in tl.static_range(count):
            if i % each == 0:
                pairs = _bytes(x, y, (bit // 8 + i // each) * 0x0101 + 0x0400, ASM)
            even, odd = _pair(
                pairs, table_ptr, shift, i % each * bits, i % each * bits, bits, SLABS[SLAB][5], True, DTYPE, ASM
            )
            parts = parts + (tl.reshape(tl.join(even, odd), (T // 2, elements, 2)),)
    stacked = _stacked(parts)
    if count == 1:
        operand = tl.permute(stacked, (0, 2, 1))
    elif count == 2:
        operand = tl.permute(stacked, (0, 2, 3, 1))
    elif count == 4:
        operand = tl.permute(stacked, (0, 2, 4, 3, 1))
    elif count == 8:
        operand = tl.permute(stacked, (0, 2, 5, 4, 3, 1))
    elif count == 16:
        operand = tl.permute(stacked, (0, 2, 6, 5, 4, 3, 1))
    else:
        operand = tl.permute(stacked, (0, 2, 7, 6, 5, 4, 3, 1))
    places: tl.constexpr = elements * count
    return _padded(tl.reshape(operand, (T, places)), T, places, size)


@triton.jit
def _padded(x, T: tl.constexpr, n: tl.constexpr, size: tl.constexpr):
    """x [T, n] followed by zeros, [T, size]; size is n or 2 n."""
    if size == n:
        return x
    else:
        return tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), (T, size))


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr):
    """total + x y, [rows, n]; eight rows are multiplied as columns, since an operand has no fewer than 16 rows."""
    if x.shape[0] < OPERAND:
        return tl.trans(tl.dot(tl.trans(y), tl.trans(x), tl.trans(total), input_precision=PRECISION))
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def _product(x, fields, total, TABLE: tl.constexpr, PRECISION: tl.constexpr):
    """total + x fields.

    TF32 holds a field exactly, unless it was looked up: two products, with either half of x's bits, are as good as the
    three of float32 factors.
    """
    if x.dtype == tl.float32 and not TABLE:
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        return _dot(high, fields, _dot(x - high, fields, total, "tf32"), "tf32")
    else:
        return _dot(x, fields, total, PRECISION)


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _not_ahead(x, ASM: tl.constexpr):
    """x; what depends on it is not computed ahead of the branch that asks for it."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def _zeros(SLABS: tl.constexpr, SLAB: tl.constexpr, ROWS: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.zeros((ROWS, size), tl.float32)


@triton.jit
def _places(SLABS: tl.constexpr, SLAB: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.arange(0, size)


@triton.jit
def _by_copy(x, QUERIES: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.reshape(x, (ROWS // QUERIES, QUERIES, size))


@triton.jit
def _power_of_two(x):
    """The largest that is not larger than x, 0 for x below the normal numbers: its exponent alone."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_queries(at, known, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Either half of queries at `at` [rows], divided by a power of two, [rows, HALF], and the powers.

    Queries of any size fit half precision once divided by their largest component, and by a power of two none of them
    is rounded.
    """
    d = tl.arange(0, HALF)
    inside = known[:, None] & (d < HEAD_DIM // 2)[None, :]
    low = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at[:, None] + HEAD_DIM // 2 + d[None, :], mask=inside, other=0.0).to(tl.float32)
    size = _power_of_two(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1))
    size = tl.where(size > 0, size, 1.0)
    inverse = (1.0 / size)[:, None]
    return (low * inverse).to(DTYPE), (high * inverse).to(DTYPE), size


@triton.jit
def _mean(mean_ptr, residual_ptr, d, inside):
    mean = tl.load(mean_ptr + d, mask=inside, other=0.0)
    if residual_ptr is not None:
        mean += tl.load(residual_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return mean


@triton.jit
def _in_two(x, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """x [n] as the sum of two numbers of DTYPE, in the first two of PARTS columns, [n, PARTS]."""
    part = tl.arange(0, PARTS)[None, :]
    first = x.to(DTYPE)
    rest = (x - first.to(tl.float32)).to(DTYPE)
    return tl.where(part == 0, first[:, None], tl.where(part == 1, rest[:, None], 0.0))


@triton.jit
def _maps(map_ptr, HALF: tl.constexpr, KEYS: tl.constexpr, KEY_SIZE: tl.constexpr):
    """Of every key slab, the map of either half of a query, [size, HALF] each."""
    d = tl.arange(0, HALF)[None, :]
    maps = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        here = map_ptr + (start + _places(KEYS, i))[:, None] * HALF + d
        maps = maps + (tl.load(here), tl.load(here + KEY_SIZE * HALF))
        start += KEYS[i][4]
    return maps


@triton.jit
def _corrections(
    correction_ptr,
    KEYS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of every key slab, what its fields count too much, in the first two of PARTS rows, [PARTS, size]."""
    part = tl.arange(0, PARTS)[:, None]
    corrections = ()
    start = 0
    for i in tl.static_range(len(KEYS)):
        correction = tl.load(correction_ptr + part * KEY_SIZE + (start + _places(KEYS, i))[None, :]).to(DTYPE)
        if not ASM or tl.float16 != DTYPE:
            # The first part is of fields that are masked into half precision.
            correction = tl.where(part > 0, correction, 0.0)
        corrections = corrections + (correction,)
        start += KEYS[i][4]
    return corrections


@triton.jit
def _in_fours(x):
    """Brings neighbours of eight columns, two by two as a product leaves them, to the lanes that multiply them next.

    A lane holds pairs of two neighbouring eights, and of an operand made of bytes four columns in a row.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (rows, columns // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(pairs, (rows, columns))


@triton.jit
def _mapped_queries(
    low,
    high,
    block,
    maps,
    mean_low,
    mean_high,
    mean_scale,
    corrections,
    angle_ptr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    ROTATED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scaled queries in the space of the stored keys, each turned back by the first column of its block.

    `block` is one for all, or [rows, 1]. Returns what all scores of a row lack, [rows]: the product with the keys'
    mean, less what fields count too much; and for every key slab the mapped queries, [rows, size].
    """
    rows: tl.constexpr = low.shape[0]
    if ROTATED:
        d = tl.arange(0, HALF)[None, :]
        in_head = d < HEAD_DIM // 2
        angles = angle_ptr + block * HEAD_DIM + d
        cos = tl.load(angles, mask=in_head, other=0.0)
        sin = tl.load(angles + HEAD_DIM // 2, mask=in_head, other=0.0)
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        turned = low * cos + high * sin
        high = high * cos - low * sin
        low = turned
    lacking = tl.zeros((rows, mean_low.shape[1]), tl.float32)
    lacking = _dot(low.to(DTYPE), mean_low, lacking, PRECISION)
    lacking = _dot(high.to(DTYPE), mean_high, lacking, PRECISION) * mean_scale
    low = low.to(maps[0].dtype)
    high = high.to(maps[0].dtype)
    queries = ()
    for i in tl.static_range(len(KEYS)):
        mapped = _dot(low, tl.trans(maps[2 * i]), _zeros(KEYS, i, rows), PRECISION)
        mapped = _dot(high, tl.trans(maps[2 * i + 1]), mapped, PRECISION).to(DTYPE)
        # Of the rounded queries, so that it cancels.
        lacking = _dot(mapped, tl.trans(corrections[i]), lacking, PRECISION)
        queries = queries + (_in_fours(mapped),)
    return (tl.sum(lacking, 1),) + queries


@triton.jit
def _in_pairs(row):
    """The token at a row of a tile's keys: an order that `_in_fours` brings the scores out of."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2


@triton.jit
def _key_elements(
    slab_ptr, row, first, columns, one, T: tl.constexpr, SHORT: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr
):
    """What lanes take of T keys, [4, 8, T / 8, elements / 4]: four lanes share a key, with neighbouring elements each.

    The shape is that of an operand's lanes and registers, so that what is loaded need not move.
    """
    words: tl.constexpr = SLABS[SLAB][1]
    elements: tl.constexpr = SLABS[SLAB][2]
    stored: tl.constexpr = SLABS[SLAB][6]
    each: tl.constexpr = elements // 4
    token = _in_pairs(tl.arange(0, 8))[None, :, None, None]
    element = tl.arange(0, 4)[:, None, None, None] * each
    word = element if words == elements else element // (elements // words)
    eighth = _in_pairs(tl.arange(0, T // 8) * 8)[None, None, :, None]
    next_word = tl.arange(0, each)[None, None, None, :]
    mask = None
    if SHORT:
        mask = token + eighth < columns
    if stored < words:
        is_stored = word + next_word < stored
        mask = is_stored if mask is None else mask & is_stored
    # Were it known that neighbouring lanes load neighbouring words, one lane would load the words of several. The row
    # moves the pointer, so that the rest is counted in 32 bits; what lanes have in common is added last.
    lane_ptr = slab_ptr + (row + first) * stored + (token * stored + word) * one
    return tl.load(lane_ptr + (eighth * stored + next_word), mask=mask)


@triton.jit
def _key_words(slabs, row, first, columns, one, T: tl.constexpr, SHORT: tl.constexpr, KEYS: tl.constexpr):
    """The elements of a tile of every key slab."""
    words = ()
    for i in tl.static_range(len(KEYS)):
        words = words + (_key_elements(slabs[i], row, first, columns, one, T, SHORT, KEYS, i),)
    return words


@triton.jit
def _value_words(slabs, row, first, columns, T: tl.constexpr, SHORT: tl.constexpr, VALUES: tl.constexpr):
    """The words of a tile of every value slab."""
    words = ()
    for i in tl.static_range(len(VALUES)):
        words = words + (_value_elements(slabs[i], row, first, columns, T, SHORT, VALUES, i),)
    return words


@triton.jit
def _tile_scores(
    queries,
    key_words,
    slabs,
    table_ptr,
    table,
    row,
    next_first,
    columns,
    one,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    KEYS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Products of mapped queries with a tile's keys, [ROWS, T], and the words of the next tile.

    Those are asked for a tile ahead, so that memory has the time of a tile to answer.
    """
    products = tl.zeros((ROWS, T), tl.float32)
    next_words = ()
    for i in tl.static_range(len(KEYS)):
        keys = _key_operand(key_words[i], table_ptr, table, T, ROWS, KEYS, i, DTYPE, ASM)
        next_words = next_words + (_key_elements(slabs[i], row, next_first, columns, one, T, SHORT, KEYS, i),)
        products = _product(queries[i], keys, products, KEYS[i][5], PRECISION)
    return (products,) + next_words


@triton.jit
def _tile_sums(
    weights,
    own,
    sums,
    value_words,
    slabs,
    table_ptr,
    table,
    row,
    next_first,
    columns,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    VALUES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Adds a tile's values by weight to the sums of the rows in `own`, None for all; and the words of the next tile."""
    new = ()
    next_words = ()
    for i in tl.static_range(len(VALUES)):
        values = _value_operand(value_words[i], table_ptr, table, T, VALUES, i, DTYPE, ASM)
        next_words = next_words + (_value_elements(slabs[i], row, next_first, columns, T, SHORT, VALUES, i),)
        if own is None:
            new = new + (_product(weights, values, sums[i], VALUES[i][5], PRECISION),)
        else:
            products = _product(weights, values, _zeros(VALUES, i, ROWS), VALUES[i][5], PRECISION)
            new = new + (tl.where(own, sums[i] + products, sums[i]),)
    return new + next_words


@triton.jit
def attend_context(
    query_ptr,
    map_ptr,
    map_scale_ptr,
    correction_ptr,
    key_mean_ptr,
    key_residual_ptr,
    angle_ptr,
    key_slabs,
    value_slabs,
    key_table_ptr,
    value_table_ptr,
    lengths_ptr,
    protected_ptr,
    mask_ptr,
    partial_ptr,
    highest_ptr,
    total_ptr,
    stride_query_row,
    stride_query_head,
    stride_query_token,
    stride_mask,
    columns,
    num_tokens,
    num_rows,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    ROTATED: tl.constexpr,
    T: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of queries to a split of a packed context: sums, maxima and totals, to be joined by `merge`.

    Grid: (row tiles x splits, heads, contexts). A row is a query of the context: a token of one row of the extension.
    QUERIES (a power of two up to ROWS, 8 or 16) are worked on at once. The rows of an operand hold them once for each
    of `ROWS / QUERIES` tiles, a group, which are multiplied one after the other with their own rows alone, so that
    scores and weights of a group fill one tile.

    With OVERLAP, all that does not change from one call to the next is loaded while the kernel before may still run.
    """
    num_heads = tl.num_programs(1)
    split = tl.program_id(0) % SPLITS
    row_tile = tl.program_id(0) // SPLITS
    head = tl.program_id(1)
    context = tl.program_id(2)
    place = (context * num_heads + head).to(tl.int64)
    copies: tl.constexpr = ROWS // QUERIES
    # Of a small operand, of which two are used.
    parts: tl.constexpr = 24 - ROWS

    i = tl.arange(0, ROWS)
    row = row_tile * QUERIES + i % QUERIES
    known = row < num_rows
    if SHARED:
        batch = row // num_tokens
        token = row % num_tokens
    else:
        batch = tl.zeros_like(row) + context
        token = row
    unit = tl.load(map_scale_ptr + head)
    maps = _maps(map_ptr + head * (2 * KEY_SIZE * HALF), HALF, KEYS, KEY_SIZE)
    corrections = _corrections(correction_ptr, KEYS, KEY_SIZE, parts, DTYPE, ASM)
    key_table_ptr += head * 16
    value_table_ptr += head * 16
    key_table = _table(key_table_ptr, KEYS, DTYPE, ASM)
    value_table = _table(value_table_ptr, VALUES, DTYPE, ASM)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    length = tl.load(lengths_ptr + context).to(tl.int32)
    # Splits are of whole blocks, tiles whole parts of a block.
    blocks = tl.cdiv(columns, BLOCK_TILES * T)
    tiles_per_split = tl.cdiv(blocks, SPLITS) * BLOCK_TILES
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(length, T))
    # Asked for first, because they come from furthest.
    row_of_slabs = place * columns
    one = tl.minimum(columns, 1)
    first_loaded = _first_loaded(first_tile, columns, T)
    key_words = _key_words(key_slabs, row_of_slabs, first_loaded, columns, one, T, SHORT, KEYS)
    value_words = _value_words(value_slabs, row_of_slabs, first_loaded, columns, T, SHORT, VALUES)
    hidden = ()
    for slot in tl.static_range(SLOTS):
        hidden = hidden + (tl.load(protected_ptr + context * SLOTS + slot),)

    query_ptr += head * stride_query_head + batch.to(tl.int64) * stride_query_row + token * stride_query_token
    low, high, size = _scaled_queries(query_ptr, known, HEAD_DIM, HALF, DTYPE)
    key_mean_ptr += head * HEAD_DIM
    residual_ptr = key_residual_ptr
    if residual_ptr is not None:
        residual_ptr += place * HEAD_DIM
    d = tl.arange(0, HALF)
    in_head = d < HEAD_DIM // 2
    mean_low = _mean(key_mean_ptr, residual_ptr, d, in_head)
    mean_high = _mean(key_mean_ptr, residual_ptr, HEAD_DIM // 2 + d, in_head)
    # Scores are counted in units in which the maps are at most 1. The mean may be far more.
    largest = tl.max(tl.maximum(tl.abs(mean_low), tl.abs(mean_high)), 0)
    mean_scale = tl.maximum(_power_of_two(largest / unit), 1.0)
    mean_low = _in_two(mean_low / unit / mean_scale, parts, DTYPE)
    mean_high = _in_two(mean_high / unit / mean_scale, parts, DTYPE)
    # Not so small that a score of minus infinity would become none.
    scale = tl.maximum(size * (unit * _LOG2E), _LEAST)

    highest = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = ()
    for slab in tl.static_range(len(VALUES)):
        sums = sums + (_zeros(VALUES, slab, ROWS),)
    for begin in tl.range(first_tile, last_tile, copies):
        end = tl.minimum(begin + copies, last_tile)
        own_tile = begin + i // QUERIES
        queries = _mapped_queries(
            low,
            high,
            begin // BLOCK_TILES if copies == 1 else own_tile[:, None] // BLOCK_TILES,
            maps,
            mean_low,
            mean_high,
            mean_scale,
            corrections,
            angle_ptr,
            HEAD_DIM,
            HALF,
            KEYS,
            ROTATED,
            DTYPE,
            PRECISION,
        )
        if copies == 1:
            scored = _tile_scores(
                queries[1:], key_words, key_slabs, key_table_ptr, key_table, row_of_slabs,
                _first_loaded(end, columns, T), columns, one, T, ROWS, SHORT, KEYS, DTYPE, PRECISION, ASM,
            )  # fmt: skip
            scores = scored[0]
            key_words = scored[1:]
        else:
            scores = tl.zeros((ROWS, T), tl.float32)
            for tile in tl.range(begin, end):
                scored = _tile_scores(
                    queries[1:], key_words, key_slabs, key_table_ptr, key_table, row_of_slabs,
                    _first_loaded(tile + 1, columns, T), columns, one, T, ROWS, SHORT, KEYS, DTYPE, PRECISION, ASM,
                )  # fmt: skip
                scores = tl.where((own_tile == tile)[:, None], scored[0], scores)
                key_words = scored[1:]
        # All of most groups is seen.
        partly = (begin + copies > last_tile) | ((begin + copies) * T > length)
        for slot in tl.static_range(SLOTS):
            partly = partly | ((hidden[slot] >= begin * T) & (hidden[slot] < (begin + copies) * T))
        if mask_ptr is not None or partly:
            own_first = _not_ahead(own_tile * T, ASM)
            column = _first_loaded(own_tile, columns, T)[:, None] + _in_pairs(tl.arange(0, T))[None, :]
            seen = (known & (own_tile < end))[:, None] & (column >= own_first[:, None]) & (column < length)
            for slot in tl.static_range(SLOTS):
                seen = seen & (column != hidden[slot])
            if mask_ptr is not None:
                at = mask_ptr + batch[:, None].to(tl.int64) * stride_mask + column
                seen = seen & (tl.load(at, mask=seen, other=0) != 0)
            scores = tl.where(seen, scores, float("-inf"))
        lacking = queries[0] * scale
        peak = tl.maximum(highest, tl.max(scores, 1) * scale + lacking)
        keep = _exp2(highest - peak, ASM)
        weights = _exp2(scores * scale[:, None] + (lacking - peak)[:, None], ASM)
        total = total * keep + tl.sum(weights, 1)
        highest = peak
        weights = _in_fours(weights.to(DTYPE))
        kept = ()
        for slab in tl.static_range(len(VALUES)):
            kept = kept + (sums[slab] * keep[:, None],)
        sums = kept
        if copies == 1:
            summed = _tile_sums(
                weights, None, sums, value_words, value_slabs, value_table_ptr, value_table, row_of_slabs,
                _first_loaded(end, columns, T), columns, T, ROWS, SHORT, VALUES, DTYPE, PRECISION, ASM,
            )  # fmt: skip
            sums = summed[: len(VALUES)]
            value_words = summed[len(VALUES) :]
        else:
            for tile in tl.range(begin, end):
                summed = _tile_sums(
                    weights, (own_tile == tile)[:, None], sums, value_words, value_slabs, value_table_ptr, value_table,
                    row_of_slabs, _first_loaded(tile + 1, columns, T), columns, T, ROWS, SHORT, VALUES, DTYPE,
                    PRECISION, ASM,
                )  # fmt: skip
                sums = summed[: len(VALUES)]
                value_words = summed[len(VALUES) :]

    out = (place * SPLITS + split) * num_rows
    query = row_tile * QUERIES + tl.arange(0, QUERIES)
    by_copy = tl.reshape(highest, (copies, QUERIES))
    peak = tl.max(by_copy, 0)
    keep = _exp2(by_copy - peak[None, :], ASM)
    start = 0
    for slab in tl.static_range(len(VALUES)):
        joined = tl.sum(_by_copy(sums[slab], QUERIES, ROWS, VALUES, slab) * keep[:, :, None], 0)
        at = partial_ptr + (out + query)[:, None] * VALUE_SIZE + start + _places(VALUES, slab)[None, :]
        tl.store(at, joined, mask=(query < num_rows)[:, None])
        start += VALUES[slab][4]
    tl.store(highest_ptr + out + query, peak, mask=query < num_rows)
    joined_total = tl.sum(tl.reshape(total, (copies, QUERIES)) * keep, 0)
    tl.store(total_ptr + out + query, joined_total, mask=query < num_rows)


@triton.jit
def _dense(at, stride, row, d, inside):
    """Dense keys or values at rows of so many numbers, [rows, SIZE], zeros outside."""
    return tl.load(at + row[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _joined(query, keys, values, seen, highest, total, sums, PRECISION: tl.constexpr):
    """Adds the attention to dense tokens, of which a row sees those in `seen` [rows, tokens], to a running softmax."""
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * _LOG2E
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, 1))
    keep = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    total = total * keep + tl.sum(weights, 1)
    values = values.to(query.dtype)
    sums = tl.dot(weights.to(query.dtype), values, sums * keep[:, None], input_precision=PRECISION)
    return peak, total, sums


@triton.jit
def merge(
    query_ptr,
    key_ptr,
    value_ptr,
    new_mask_ptr,
    protected_key_ptr,
    protected_value_ptr,
    protected_mask_ptr,
    partial_ptr,
    highest_ptr,
    total_ptr,
    value_map_ptr,
    value_mean_ptr,
    value_residual_ptr,
    output_ptr,
    stride_query_row,
    stride_query_head,
    stride_query_token,
    stride_key_row,
    stride_key_head,
    stride_key_token,
    stride_value_row,
    stride_value_head,
    stride_value_token,
    batch_size,
    num_tokens,
    num_rows,
    num_slots,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_PLACES: tl.constexpr,
    SHARED: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Joins the splits of a context, its protected tokens and the new tokens, and maps the output back.

    Grid: (row tiles, heads, batch). A row is a new token of one row of the extension; with FLAT a tile holds all new
    tokens of several rows, and the grid's last dimension is 1. Protected keys and values are in the model's
    coordinates here. With OVERLAP, all but the splits is loaded while `attend_context` still runs.
    """
    num_heads = tl.num_programs(1)
    head = tl.program_id(1)
    i = tl.arange(0, OPERAND)
    if FLAT:
        tile_rows = OPERAND // num_tokens * num_tokens
        row = tl.program_id(0) * tile_rows + i
        known = (i < tile_rows) & (row < batch_size * num_tokens)
        batch = (row // num_tokens).to(tl.int64)
        token = row % num_tokens
    else:
        batch = tl.zeros_like(i).to(tl.int64) + tl.program_id(2)
        token = tl.program_id(0) * OPERAND + i
        known = token < num_tokens
    context = batch * 0 if SHARED else batch
    place = context * num_heads + head
    d = tl.arange(0, SIZE)
    in_head = d < HEAD_DIM
    inside = known[:, None] & in_head[None, :]
    at = batch * stride_query_row + head * stride_query_head + token * stride_query_token
    query = _dense(query_ptr, 1, at, d, inside)
    mean = tl.load(value_mean_ptr + head * HEAD_DIM + d, mask=in_head, other=0.0)[None, :]
    if value_residual_ptr is not None:
        mean += _dense(value_residual_ptr, HEAD_DIM, place, d, inside).to(tl.float32)

    # What will be wanted is asked for at once: a short kernel is waiting for memory.
    key_ptr += head * stride_key_head
    value_ptr += head * stride_value_head
    new = token if FLAT else i
    seen = known if FLAT else i < num_tokens
    there = seen[:, None] & in_head[None, :]
    keys = _dense(key_ptr, 1, batch * stride_key_row + new * stride_key_token, d, there)
    values = _dense(value_ptr, 1, batch * stride_value_row + new * stride_value_token, d, there)
    # Of contexts of their own, rows take a slot each at a time, and see their own one alone.
    apart: tl.constexpr = FLAT and not SHARED
    slot = tl.zeros_like(i) if apart else i
    if protected_key_ptr is not None:
        first_slot = place * num_slots
        slot_inside = (known if apart else slot < num_slots)[:, None] & in_head[None, :]
        slot_keys = _dense(protected_key_ptr, HEAD_DIM, first_slot + slot, d, slot_inside)
        slot_values = _dense(protected_value_ptr, HEAD_DIM, first_slot + slot, d, slot_inside)
    component = tl.arange(0, VALUE_PLACES)
    stored = component < VALUE_SIZE
    back = value_map_ptr + head * (VALUE_SIZE * HEAD_DIM) + component[:, None] * HEAD_DIM + d[None, :]
    back = tl.load(back, mask=stored[:, None] & in_head[None, :], other=0.0)

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    first_row = place * SPLITS * num_rows + (batch * num_tokens if SHARED else batch * 0) + token
    split = tl.arange(0, SPLIT_PLACES)
    part = first_row[:, None] + split[None, :] * num_rows
    is_part = known[:, None] & (split < SPLITS)[None, :]
    part_highest = tl.load(highest_ptr + part, mask=is_part, other=_LOWEST)
    part_total = tl.load(total_ptr + part, mask=is_part, other=0.0)
    highest = tl.max(part_highest, 1)
    total = tl.sum(tl.exp2(part_highest - highest[:, None]) * part_total, 1)
    weighed = tl.zeros((OPERAND, VALUE_PLACES), tl.float32)
    for s in tl.static_range(SPLITS):
        split_row = first_row + s * num_rows
        split_keep = tl.exp2(tl.load(highest_ptr + split_row, mask=known, other=_LOWEST) - highest)
        parts = partial_ptr + split_row[:, None] * VALUE_SIZE + component[None, :]
        weighed += split_keep[:, None] * tl.load(parts, mask=known[:, None] & stored[None, :], other=0.0)
    sums = tl.dot(weighed, back, total[:, None] * mean, input_precision=PRECISION)

    if new_mask_ptr is not None:
        seen = seen & (tl.load(new_mask_ptr + batch * num_tokens + new, mask=seen, other=0) != 0)
    same = batch[:, None] == batch[None, :]
    highest, total, sums = _joined(query, keys, values, same & seen[None, :], highest, total, sums, PRECISION)
    if not FLAT:
        for first in range(OPERAND, num_tokens, OPERAND):
            new = first + i
            seen = new < num_tokens
            there = seen[:, None] & in_head[None, :]
            keys = _dense(key_ptr, 1, batch * stride_key_row + new * stride_key_token, d, there)
            values = _dense(value_ptr, 1, batch * stride_value_row + new * stride_value_token, d, there)
            if new_mask_ptr is not None:
                seen = seen & (tl.load(new_mask_ptr + batch * num_tokens + new, mask=seen, other=0) != 0)
            highest, total, sums = _joined(query, keys, values, seen[None, :], highest, total, sums, PRECISION)
    if protected_key_ptr is not None:
        step: tl.constexpr = 1 if apart else OPERAND
        own = (i[:, None] == i[None, :]) if apart else (i[:, None] >= 0)
        for first in range(0, num_slots, step):
            slot_seen = own & known[:, None] & (slot + first < num_slots)[None, :]
            if protected_mask_ptr is not None:
                slot_mask = protected_mask_ptr + batch[:, None] * num_slots + (slot + first)[None, :]
                slot_seen = slot_seen & (tl.load(slot_mask, mask=slot_seen, other=0) != 0)
            following = slot + first + step
            is_slot = slot_inside & (following < num_slots)[:, None]
            next_keys = _dense(protected_key_ptr, HEAD_DIM, first_slot + following, d, is_slot)
            next_values = _dense(protected_value_ptr, HEAD_DIM, first_slot + following, d, is_slot)
            highest, total, sums = _joined(query, slot_keys, slot_values, slot_seen, highest, total, sums, PRECISION)
            slot_keys = next_keys
            slot_values = next_values

    result = sums / tl.maximum(total, _LEAST_TOTAL)[:, None]
    at = output_ptr + ((batch * num_tokens + token) * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, result.to(output_ptr.dtype.element_ty), mask=inside)
