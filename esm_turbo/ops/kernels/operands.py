"""Packed words become operands of `tl.dot`, in registers. Imported only where kernels run; see docs/notes/kernels.md.

Bytes are moved two at a time. A field is then masked in place, where its bits are a subnormal half-precision number, or
looked up in a table held in registers. The order of components in an operand follows from which field of which word a
lane holds; it is defined in `triton_layout`. The maps of the query and of the output are permuted to match, which costs
nothing at run time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.products import MMA_ROWS
from esm_turbo.ops.slabs import SlabSpec

# Bytes that one prefetch instruction fetches.
_PREFETCH_BYTES: tl.constexpr = tl.constexpr(64)


@triton.constexpr_function
def slab_of(specs, index):
    """The `SlabSpec` of one slab: Triton's indexing of a named tuple loses the names of its fields."""
    return SlabSpec(*specs[index])


@triton.jit
def _permute_bytes(x, y, selector, ASM: tl.constexpr):
    """Four of the eight bytes of x (0 to 3) and y (4 to 7), one for each of the selector's lowest four nibbles."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        result = 0
        for i in tl.static_range(4):
            nibble = selector >> 4 * i & 7
            result |= (tl.where(nibble < 4, x, y) >> (nibble % 4 * 8) & 0xFF) << 8 * i
        return result


@triton.jit
def _per_lane(x, ASM: tl.constexpr):
    """x, hiding from the compiler that it is warp-uniform.

    `prmt` takes at most one operand from a uniform register; the compiler would copy the others for each use.
    """
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
def load_packed_table(table_ptr, SLAB: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A table of 16 half-precision numbers as eight words of four bytes each.

    Of entries 0 to 7, two words of lower bytes and two of upper bytes; then the same of entries 8 to 15. Empty without
    a table and in float32.
    """
    table = ()
    if SLAB.table and tl.float16 == DTYPE:
        words = table_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(0, 8, 4):
            a, b = tl.load(words + i), tl.load(words + i + 1)
            c, d = tl.load(words + i + 2), tl.load(words + i + 3)
            for selector in tl.static_range(0x6420, 0x7531 + 1, 0x1111):
                table = table + (_per_lane(_permute_bytes(a, b, selector, ASM), ASM),)
                table = table + (_per_lane(_permute_bytes(c, d, selector, ASM), ASM),)
    return table


@triton.jit
def _look_up(word, table, ASM: tl.constexpr):
    """Table entries at the eight 4-bit fields of a word: four pairs, two of bytes 0 and 2, then two of bytes 1 and 3.

    A pair holds the same field of the lower and of the upper of the two bytes, in half precision.
    """
    index = word & 0x77777777
    upper = word >> 3 & 0x11111111
    ones = _per_lane(tl.zeros_like(table[0]) + 0xFF00, ASM)
    pairs = ()
    for _ in tl.static_range(2):
        # 0xFF in the bytes whose field is 8 or more.
        above = _permute_bytes(ones, ones, upper, ASM)
        low_first = _permute_bytes(table[0], table[1], index, ASM)
        low = low_first & ~above | _permute_bytes(table[4], table[5], index, ASM) & above
        high_first = _permute_bytes(table[2], table[3], index, ASM)
        high = high_first & ~above | _permute_bytes(table[6], table[7], index, ASM) & above
        for selector in tl.static_range(0x6240, 0x7351 + 1, 0x1111):
            pair = _permute_bytes(low, high, selector, ASM)
            first = pair.to(tl.int16).to(tl.float16, bitcast=True)
            second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            pairs = pairs + ((first, second),)
        index = index >> 16
        upper = upper >> 16
    return pairs


@triton.jit
def _unpack_pair(
    word,
    table_ptr,
    shift,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Two fields of BITS bits: at bit LOW + shift of byte 0 and at bit HIGH + shift of byte 2.

    A field at bit s of its byte is masked in place, never shifted, so that it counts 2^s times its value; the maps
    divide by 2^s (`triton_layout.field_scale`). In half precision it is read as a subnormal number, in units of 2^-24.
    In float32 2^(BITS - 1) is subtracted: tensor cores truncate sums, which shows if all terms have one sign.
    """
    mask: tl.constexpr = 2**BITS - 1
    if TABLE:
        low = tl.load(table_ptr + ((word >> (LOW + shift)) & mask))
        high = tl.load(table_ptr + ((word >> (16 + HIGH + shift)) & mask))
        return low.to(DTYPE), high.to(DTYPE)
    else:
        ones: tl.constexpr = 2**LOW + 2 ** (16 + HIGH)
        pair = word & ((mask * ones) << shift)
        if tl.float16 == DTYPE:
            low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
            return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
        else:
            middles = (2 ** (BITS - 1) * ones) << shift
            low, high = (pair & 0xFFFF) - (middles & 0xFFFF), (pair >> 16) - (middles >> 16)
            return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _stack(parts):
    """Stacks 1, 2, 4, 8 or 16 tensors along new trailing dimensions of size 2, lowest bit of the index first."""
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return tl.join(parts[0], parts[1])
    else:
        half: tl.constexpr = len(parts) // 2
        return tl.join(_stack(parts[:half]), _stack(parts[half:]))


@triton.jit
def _pad_columns(x, BLOCK_N: tl.constexpr, n: tl.constexpr, size: tl.constexpr):
    """x [BLOCK_N, n] followed by zeros, [BLOCK_N, size]; size is n or 2 n."""
    if size == n:
        return x
    else:
        return tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), (BLOCK_N, size))


@triton.jit
def tile_start(tile, num_columns, BLOCK_N: tl.constexpr):
    """The first column loaded for a tile of BLOCK_N columns.

    The last tile is loaded from the context's last BLOCK_N columns, so that no load needs a mask. A context shorter
    than one tile is loaded from column 0: there is room for a whole tile in memory.
    """
    return tl.maximum(tl.minimum(tile * BLOCK_N, num_columns - BLOCK_N), 0)


@triton.jit
def _prefetch_slab(slab_ptr, row, first, COUNT: tl.constexpr, SLAB: tl.constexpr):
    size: tl.constexpr = SLAB.stored * slab_ptr.dtype.element_ty.primitive_bitwidth // 8
    # Bytes between the addresses of neighbouring lanes.
    step: tl.constexpr = min(_PREFETCH_BYTES, COUNT * size // 32)
    row_address = (slab_ptr + row * SLAB.stored).to(tl.int64)
    for begin in tl.static_range(0, COUNT * size, 32 * step):
        tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b64 a; mov.u32 t, %laneid; mad.lo.u32 t, t, $3, $2; cvt.u64.u32 a, t;"
            " add.s64 a, a, $1; prefetch.global.L2 [a]; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [row_address, first * size + begin, step],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch(slab_ptrs, row, first, end, COUNT: tl.constexpr, SLABS: tl.constexpr, ASM: tl.constexpr):
    """Prefetches COUNT columns of all slabs, from column `first` of a row, to the L2 cache; takes no registers.

    Does nothing if they go beyond column `end`, which may be the end of allocated memory.
    """
    if ASM and first + COUNT <= end:
        for i in tl.static_range(len(SLABS)):
            _prefetch_slab(slab_ptrs[i], row, first, COUNT, slab_of(SLABS, i))


@triton.constexpr_function
def is_spread(slabs, index, rows):
    """True if a slab of keys goes through shared memory: its only word is needed by four lanes.

    It takes fewer loads and registers, which was measured to be faster beside a slab of many words, and slower without.
    """
    specs = [SlabSpec(*slab) for slab in slabs]
    return rows < MMA_ROWS.value and specs[index].words == 1 and specs[0].words >= 4


@triton.jit
def _load_words(slab_ptr, row, first, token, SLAB: tl.constexpr):
    """The words of some tokens of a tile, [BLOCK_N, words]."""
    word = tl.arange(0, SLAB.words)[None, :]
    mask = None
    if SLAB.stored < SLAB.words:
        mask = word < SLAB.stored
    return tl.load(slab_ptr + (row + first) * SLAB.stored + (token[:, None] * SLAB.stored + word), mask=mask)


@triton.jit
def _spread_keys(x, BLOCK_N: tl.constexpr, SLAB: tl.constexpr):
    """Words [BLOCK_N, words] as elements, see `_load_key_lanes`."""
    words: tl.constexpr = SLAB.words
    x = tl.permute(tl.reshape(x, (BLOCK_N // 8, 8, words)), (2, 1, 0))
    x = tl.broadcast_to(x[:, None, :, :], (words, SLAB.elements // words, 8, BLOCK_N // 8))
    return tl.permute(tl.reshape(x, (4, SLAB.elements // 4, 8, BLOCK_N // 8)), (0, 2, 3, 1))


@triton.jit
def load_key_slab(slab_ptr, row, first, opaque_one, BLOCK_N: tl.constexpr, SLAB: tl.constexpr, SPREAD: tl.constexpr):
    """The words of keys, [BLOCK_N, words], if they are to be spread; else their elements, see `_load_key_lanes`."""
    if SPREAD:
        return _load_words(slab_ptr, row, first, tl.arange(0, BLOCK_N), SLAB)
    else:
        return _load_key_lanes(slab_ptr, row, first, opaque_one, BLOCK_N, SLAB)


@triton.jit
def _load_key_lanes(slab_ptr, row, first, opaque_one, BLOCK_N: tl.constexpr, SLAB: tl.constexpr):
    """The elements of keys, [4, 8, BLOCK_N / 8, elements / 4]: four lanes share a key and hold neighbouring elements.

    The shape follows the lanes and registers of the operand, so that no loaded data moves between lanes.
    """
    per_lane: tl.constexpr = SLAB.elements // 4
    token = tl.arange(0, 8)[None, :, None, None]
    element = tl.arange(0, 4)[:, None, None, None] * per_lane
    word = element if SLAB.words == SLAB.elements else element // (SLAB.elements // SLAB.words)
    eighth = (tl.arange(0, BLOCK_N // 8) * 8)[None, None, :, None]
    next_word = tl.arange(0, per_lane)[None, None, None, :]
    mask = None
    if SLAB.stored < SLAB.words:
        mask = word + next_word < SLAB.stored
    # `opaque_one` is a 1 that the compiler does not know to be 1. It hides that neighbouring lanes load neighbouring
    # words; otherwise one lane would load the words of several. The row moves the pointer, so that other offsets fit
    # 32 bits; what all lanes share is added last.
    lane_ptr = slab_ptr + (row + first) * SLAB.stored + (token * SLAB.stored + word) * opaque_one
    return tl.load(lane_ptr + (eighth * SLAB.stored + next_word), mask=mask)


@triton.jit
def load_keys(slab_ptrs, row, first, opaque_one, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr):
    """The elements of a tile of every key slab, see `load_key_slab`."""
    words = ()
    for i in tl.static_range(len(SLABS)):
        slab = load_key_slab(
            slab_ptrs[i], row, first, opaque_one, BLOCK_N, slab_of(SLABS, i), is_spread(SLABS, i, ROWS)
        )
        words = words + (slab,)
    return words


@triton.constexpr_function
def _key_axes(shape):
    """The axes of a stack of keys that make the components of an operand; axes 2 and 1 make its tokens."""
    return (*range(len(shape) - 1, 5, -1), 3, 0, *range(min(len(shape) - 1, 5), 3, -1))


@triton.jit
def key_operand(
    x,
    table_ptr,
    table,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SLAB: tl.constexpr,
    SPREAD: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Components of keys, [size, BLOCK_N], from `load_key_slab`. A lane holds four consecutive ones of a key."""
    bits: tl.constexpr = SLAB.bits
    element_bits: tl.constexpr = SLAB.element_bits
    count: tl.constexpr = element_bits // bits // 2
    upper: tl.constexpr = count if element_bits <= 8 else 0
    if SPREAD:
        x = _spread_keys(x, BLOCK_N, SLAB)
    x = x.to(tl.int32)
    shift = 0
    if element_bits < 32:
        # One byte of each half of the element, or twice the byte that holds both halves.
        bit = (tl.arange(0, 4) % (SLAB.elements // SLAB.words) * element_bits)[:, None, None, None]
        if element_bits < 8:
            shift = bit % 8
        x = _permute_bytes(x, x, bit // 8 * 0x0101 + (0x0100 if element_bits == 16 else 0), ASM)
    parts = ()
    if len(table) > 0 and element_bits == 32:
        # Bytes 0 and 2, then 1 and 3: the same byte of each half.
        pairs = _look_up(_permute_bytes(x, x, 0x3120, ASM), table, ASM)
        for i in tl.static_range(count):
            parts = parts + (tl.join(pairs[i][0], pairs[i][1]),)
    else:
        for i in tl.static_range(count):
            word = x >> (bits * i // 8 * 8)
            first, second = _unpack_pair(
                word, table_ptr, shift, bits * i % 8, bits * (i + upper) % 8, bits, SLAB.table, DTYPE
            )
            parts = parts + (tl.join(first, second),)
    stacked = _stack(parts)
    # With one pair of fields per element, every other pair of columns is empty.
    empty: tl.constexpr = count == 1 and SLAB.size > 2 * SLAB.elements
    if empty:
        stacked = tl.join(stacked, tl.zeros_like(stacked))
    order: tl.constexpr = _key_axes(stacked.shape)
    columns: tl.constexpr = 2 * count * SLAB.elements * (2 if empty else 1)
    # Built in the orientation in which it is multiplied: a transposition would move it between lanes.
    if ROWS < MMA_ROWS:
        transposed = tl.reshape(tl.permute(stacked, (2, 1) + order), (BLOCK_N, columns))
        return tl.trans(_pad_columns(transposed, BLOCK_N, columns, SLAB.size))
    else:
        operand = tl.reshape(tl.permute(stacked, () + order + (2, 1)), (columns, BLOCK_N))
        if columns < SLAB.size:
            operand = tl.reshape(tl.permute(tl.join(operand, tl.zeros_like(operand)), (2, 0, 1)), (SLAB.size, BLOCK_N))
        return operand


@triton.constexpr_function
def field_unit(SLAB, DTYPE):
    """The value of a unit of a slab's fields in an operand of DTYPE."""
    return SLAB.unit(tl.float16 == DTYPE)


@triton.jit
def token_at(row):
    """The token in a row of a tile's values: the order in which `pairs_to_quads` leaves the weights."""
    return row // 16 * 16 + row % 4 // 2 * 8 + row % 16 // 4 * 2 + row % 2


@triton.jit
def load_value_slab(slab_ptr, row, first, BLOCK_N: tl.constexpr, SLAB: tl.constexpr):
    """The words of values, [BLOCK_N, words]."""
    return _load_words(slab_ptr, row, first, token_at(tl.arange(0, BLOCK_N)), SLAB)


@triton.jit
def load_values(slab_ptrs, row, first, BLOCK_N: tl.constexpr, SLABS: tl.constexpr):
    """The words of a tile of every value slab, see `load_value_slab`."""
    words = ()
    for i in tl.static_range(len(SLABS)):
        words = words + (load_value_slab(slab_ptrs[i], row, first, BLOCK_N, slab_of(SLABS, i)),)
    return words


@triton.constexpr_function
def _field_axes(shape):
    """The axes of a stack of values that count an element's fields, from the highest bit of the index on."""
    return tuple(range(len(shape) - 1, 2, -1))


@triton.jit
def value_operand(
    x,
    table_ptr,
    table,
    BLOCK_N: tl.constexpr,
    SLAB: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Components of values, [BLOCK_N, size], from their words [BLOCK_N, words].

    Eight lanes share a value; two neighbouring tokens fill a register.
    """
    bits: tl.constexpr = SLAB.bits
    elements: tl.constexpr = SLAB.elements
    element_bits: tl.constexpr = SLAB.element_bits
    count: tl.constexpr = element_bits // bits
    per_byte: tl.constexpr = 8 // bits if element_bits > 8 else count
    even, odd = tl.split(tl.permute(tl.reshape(x, (BLOCK_N // 2, 2, SLAB.words)), (0, 2, 1)))
    x = even.to(tl.int32)[:, :, None]
    y = odd.to(tl.int32)[:, :, None]
    bit = (tl.arange(0, elements // SLAB.words) * element_bits)[None, None, :]
    shift = bit % 8 if element_bits < 8 else 0
    parts = ()
    if len(table) > 0 and element_bits == 32:
        # Bytes of the two tokens alternate.
        pairs = _look_up(_permute_bytes(x, y, 0x5140, ASM), table, ASM)
        pairs = pairs + _look_up(_permute_bytes(x, y, 0x7362, ASM), table, ASM)
        for i in tl.static_range(count):
            parts = parts + (tl.reshape(tl.join(pairs[i][0], pairs[i][1]), (BLOCK_N // 2, elements, 2)),)
    else:
        for i in tl.static_range(count):
            if i % per_byte == 0:
                pairs = _permute_bytes(x, y, (bit // 8 + i // per_byte) * 0x0101 + 0x0400, ASM)
            even, odd = _unpack_pair(
                pairs, table_ptr, shift, i % per_byte * bits, i % per_byte * bits, bits, SLAB.table, DTYPE
            )
            parts = parts + (tl.reshape(tl.join(even, odd), (BLOCK_N // 2, elements, 2)),)
    stacked = _stack(parts)
    operand = tl.permute(stacked, (0, 2) + _field_axes(stacked.shape) + (1,))
    columns: tl.constexpr = elements * count
    return _pad_columns(tl.reshape(operand, (BLOCK_N, columns)), BLOCK_N, columns, SLAB.size)
