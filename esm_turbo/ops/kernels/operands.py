"""Packed words become operands of `tl.dot`, in registers. Imported only where kernels run; docs/kernels.md draws it.

Bytes are brought into place by twos, and a field is masked into the mantissa of 1024 where it stands, or looked up in a
table that lies in registers. The order of components in an operand follows from which field of which word a lane holds
(`triton_layout`); it is undone in the maps of the query and of the output, which cost nothing more for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.products import OPERAND


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
def packed_table(table_ptr, SLABS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
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

    A field stays where it is in its byte: it counts 2^(its bit) times, which is in the maps (`triton_layout`). Centred,
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
def _padded(x, T: tl.constexpr, n: tl.constexpr, size: tl.constexpr):
    """x [T, n] followed by zeros, [T, size]; size is n or 2 n."""
    if size == n:
        return x
    else:
        return tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), (T, size))


@triton.jit
def places_of(SLABS: tl.constexpr, SLAB: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.arange(0, size)


@triton.jit
def first_column_of(tile, columns, T: tl.constexpr):
    """The first column that is loaded for a tile: its own, or, so that no load needs a mask, of the context's last T.

    A context shorter than a tile is loaded from its first on.
    """
    return tl.maximum(tl.minimum(tile * T, columns - T), 0)


@triton.jit
def _ask_for_slab(slab_ptr, row, first, COUNT: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr):
    stored: tl.constexpr = SLABS[SLAB][6]
    size: tl.constexpr = stored * slab_ptr.dtype.element_ty.primitive_bitwidth // 8
    # The bytes that a lane asks for: memory gives no more at once.
    each: tl.constexpr = min(64, COUNT * size // 32)
    at = (slab_ptr + row * stored).to(tl.int64)
    for begin in tl.static_range(0, COUNT * size, 32 * each):
        tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b64 a; mov.u32 t, %laneid; mad.lo.u32 t, t, $3, $2; cvt.u64.u32 a, t;"
            " add.s64 a, a, $1; prefetch.global.L2 [a]; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [at, first * size + begin, each],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def ask_for(slabs, row, first, last, COUNT: tl.constexpr, SLABS: tl.constexpr, ASM: tl.constexpr):
    """Has COUNT columns of all slabs brought to the second-level cache, which takes no register.

    Nothing where not all of them are before the last one: what is not there must not be asked for.
    """
    if ASM and first + COUNT <= last:
        for i in tl.static_range(len(SLABS)):
            _ask_for_slab(slabs[i], row, first, COUNT, SLABS, i)


@triton.jit
def load_key_slab(
    slab_ptr, row, first, columns, one, T: tl.constexpr, SHORT: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr
):
    """What lanes take of T keys, [4, 8, T / 8, elements / 4]: four lanes share a key, with neighbouring elements each.

    The shape is that of an operand's lanes and registers, so that what is loaded need not move.
    """
    words: tl.constexpr = SLABS[SLAB][1]
    elements: tl.constexpr = SLABS[SLAB][2]
    stored: tl.constexpr = SLABS[SLAB][6]
    each: tl.constexpr = elements // 4
    token = tl.arange(0, 8)[None, :, None, None]
    element = tl.arange(0, 4)[:, None, None, None] * each
    word = element if words == elements else element // (elements // words)
    eighth = (tl.arange(0, T // 8) * 8)[None, None, :, None]
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
def load_keys(slabs, row, first, columns, one, T: tl.constexpr, SHORT: tl.constexpr, KEYS: tl.constexpr):
    """The elements of a tile of every key slab."""
    words = ()
    for i in tl.static_range(len(KEYS)):
        words = words + (load_key_slab(slabs[i], row, first, columns, one, T, SHORT, KEYS, i),)
    return words


@triton.jit
def key_operand(
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
    """Components of T keys from their elements, [size, T]. A lane holds four components of a key in a row.

    In float32 fields are centred, since tensor cores cut off sums of what is all of one sign.
    """
    bits: tl.constexpr = SLABS[SLAB][0]
    words: tl.constexpr = SLABS[SLAB][1]
    elements: tl.constexpr = SLABS[SLAB][2]
    element_bits: tl.constexpr = SLABS[SLAB][3]
    size: tl.constexpr = SLABS[SLAB][4]
    count: tl.constexpr = element_bits // bits // 2
    upper: tl.constexpr = count if element_bits <= 8 else 0
    centred: tl.constexpr = tl.float32 == DTYPE
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
                pair, table_ptr, shift, bits * i % 8, bits * (i + upper) % 8, bits, SLABS[SLAB][5], centred, DTYPE, ASM
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
def token_at(row):
    """The token at a row of a tile's values: the order in which `in_fours` has the weights."""
    return row // 16 * 16 + row % 4 // 2 * 8 + row % 16 // 4 * 2 + row % 2


@triton.jit
def load_value_slab(
    slab_ptr, row, first, columns, T: tl.constexpr, SHORT: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr
):
    """The words of T values, [T, words]."""
    words: tl.constexpr = SLABS[SLAB][1]
    stored: tl.constexpr = SLABS[SLAB][6]
    token = token_at(tl.arange(0, T))[:, None]
    word = tl.arange(0, words)[None, :]
    mask = None
    if SHORT:
        mask = token < columns
    if stored < words:
        mask = (word < stored) if mask is None else mask & (word < stored)
    return tl.load(slab_ptr + (row + first) * stored + (token * stored + word), mask=mask)


@triton.jit
def load_values(slabs, row, first, columns, T: tl.constexpr, SHORT: tl.constexpr, VALUES: tl.constexpr):
    """The words of a tile of every value slab."""
    words = ()
    for i in tl.static_range(len(VALUES)):
        words = words + (load_value_slab(slabs[i], row, first, columns, T, SHORT, VALUES, i),)
    return words


@triton.jit
def value_operand(
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
