"""Triton kernel that reads packed contexts. Imported only where it runs; docs/kernels.md draws what happens.

`attend_context` maps the queries into the space of the stored keys and reads the contexts, whose blocks are shared out
evenly to programs of one warp; `merge` joins the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.operands import (
    ask_for,
    first_column_of,
    key_operand,
    load_key_slab,
    load_keys,
    load_value_slab,
    load_values,
    packed_table,
    places_of,
    value_operand,
)
from esm_turbo.ops.kernels.products import in_fours, oriented, product, zeros_of
from esm_turbo.ops.kernels.queries import (
    corrections_of,
    in_two,
    mapped_queries,
    maps_of,
    mean_of,
    power_below,
    scaled_queries,
)

# A maximum that is below all others, and the logarithm by which exponentials become powers of two.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# So many tiles before their turn words are asked for.
AHEAD: tl.constexpr = tl.constexpr(2)
# A small number that has an inverse.
_LEAST: tl.constexpr = tl.constexpr(1.0e-30)


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
def _by_copy(x, QUERIES: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr, SLAB: tl.constexpr):
    size: tl.constexpr = SLABS[SLAB][4]
    return tl.reshape(x, (ROWS // QUERIES, QUERIES, size))


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
        keys = key_operand(key_words[i], table_ptr, table, T, ROWS, KEYS, i, DTYPE, ASM)
        next_words = next_words + (load_key_slab(slabs[i], row, next_first, columns, one, T, SHORT, KEYS, i),)
        products = product(queries[i], keys, products, KEYS[i][5], PRECISION)
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
        values = value_operand(value_words[i], table_ptr, table, T, VALUES, i, DTYPE, ASM)
        next_words = next_words + (load_value_slab(slabs[i], row, next_first, columns, T, SHORT, VALUES, i),)
        if own is None and tl.float16 == DTYPE:
            new = new + (product(weights, values, sums[i], VALUES[i][5], PRECISION),)
        else:
            # Tensor cores cut off what they add up: over many tiles float32 would show it.
            products = product(weights, values, zeros_of(VALUES, i, ROWS), VALUES[i][5], PRECISION)
            new = new + ((sums[i] + products) if own is None else tl.where(own, sums[i] + products, sums[i]),)
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
    num_heads,
    num_items,
    share,
    most_parts,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    ROTATED: tl.constexpr,
    ASKS: tl.constexpr,
    T: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of queries to parts of packed contexts: sums, maxima and totals, to be joined by `merge`.

    Grid: (programs,). A row is a query of a context: a token of one row of the extension. An item is a tile of rows, of
    one head of one context. The blocks of all items, one after the other, are shared out by `share`: a program reads
    the end of one item and the beginning of the next, or a part of one, or several.

    QUERIES (a power of two up to ROWS, 8 or 16) are worked on at once. The rows of an operand hold them once for each
    of `ROWS / QUERIES` tiles, a group, which are multiplied one after the other with their own rows alone, so that
    scores and weights of a group fill one tile.

    The second-level cache is asked for the words of ASKS tiles at a time, AHEAD tiles before their turn; with OVERLAP,
    for the first tiles while the kernel before may run.
    """
    blocks = tl.maximum(tl.cdiv(columns, BLOCK_TILES * T), 1)
    first_block = tl.program_id(0) * share
    last_block = tl.minimum(first_block + share, num_items * blocks)
    row_tiles = tl.cdiv(num_rows, QUERIES)
    one = tl.minimum(columns, 1)
    copies: tl.constexpr = ROWS // QUERIES
    # Of a small operand, of which two are used.
    parts: tl.constexpr = 24 - ROWS
    i = tl.arange(0, ROWS)
    item = first_block // blocks
    item_start = item * blocks
    part = tl.program_id(0) - item_start // share
    row_tile = item % row_tiles
    head = item // row_tiles % num_heads
    context = item // row_tiles // num_heads
    if OVERLAP:
        # The second-level cache sees what is written later, so that nothing old can be read.
        first_row = (context * num_heads + head).to(tl.int64) * columns
        first_column = (first_block - item_start) * (BLOCK_TILES * T)
        ask_for(key_slabs, first_row, first_column, columns, T, KEYS, ASM)
        ask_for(value_slabs, first_row, first_column, columns, T, VALUES, ASM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    for first_of_item in tl.range(item_start, last_block, blocks, num_stages=1):
        place = (context * num_heads + head).to(tl.int64)
        length = tl.load(lengths_ptr + context).to(tl.int32)
        first_tile = tl.maximum(first_block - first_of_item, 0) * BLOCK_TILES
        last_tile = tl.minimum(tl.minimum(last_block - first_of_item, blocks) * BLOCK_TILES, tl.cdiv(length, T))
        # Asked for first, because they come from furthest.
        row_of_slabs = place * columns
        first_loaded = first_column_of(first_tile, columns, T)
        key_words = load_keys(key_slabs, row_of_slabs, first_loaded, columns, one, T, SHORT, KEYS)
        value_words = load_values(value_slabs, row_of_slabs, first_loaded, columns, T, SHORT, VALUES)
        hidden = ()
        for slot in tl.static_range(SLOTS):
            hidden = hidden + (tl.load(protected_ptr + context * SLOTS + slot),)

        row = row_tile * QUERIES + i % QUERIES
        known = row < num_rows
        if SHARED:
            batch = row // num_tokens
            token = row % num_tokens
        else:
            batch = tl.zeros_like(row) + context
            token = row
        unit = tl.load(map_scale_ptr + head)
        maps = maps_of(map_ptr + head * (2 * KEY_SIZE * HALF), HALF, KEYS, KEY_SIZE)
        corrections = corrections_of(correction_ptr, KEYS, KEY_SIZE, parts, DTYPE, ASM)
        key_tables = key_table_ptr + head * 16
        value_tables = value_table_ptr + head * 16
        key_table = packed_table(key_tables, KEYS, DTYPE, ASM)
        value_table = packed_table(value_tables, VALUES, DTYPE, ASM)
        queries_at = query_ptr + head * stride_query_head
        queries_at += batch.to(tl.int64) * stride_query_row + token * stride_query_token
        low, high, size = scaled_queries(queries_at, known, HEAD_DIM, HALF, DTYPE)
        residual_ptr = key_residual_ptr
        if residual_ptr is not None:
            residual_ptr += place * HEAD_DIM
        d = tl.arange(0, HALF)
        in_head = d < HEAD_DIM // 2
        mean_low = mean_of(key_mean_ptr + head * HEAD_DIM, residual_ptr, d, in_head)
        mean_high = mean_of(key_mean_ptr + head * HEAD_DIM, residual_ptr, HEAD_DIM // 2 + d, in_head)
        # This waits for the length, and all that comes after it waits, too.
        last_column = tl.minimum(last_tile * T, columns)
        if ASKS > 0:
            ask_for(key_slabs, row_of_slabs, first_tile * T, last_column, AHEAD * T, KEYS, ASM)
            ask_for(value_slabs, row_of_slabs, first_tile * T, last_column, AHEAD * T, VALUES, ASM)

        # Scores are counted in units in which the maps are at most 1. The mean may be far more.
        largest = tl.max(tl.maximum(tl.abs(mean_low), tl.abs(mean_high)), 0)
        mean_scale = tl.maximum(power_below(largest / unit), 1.0)
        mean_low = in_two(mean_low / unit / mean_scale, parts, DTYPE)
        mean_high = in_two(mean_high / unit / mean_scale, parts, DTYPE)
        # Not so small that a score of minus infinity would become none.
        scale = tl.maximum(size * (unit * LOG2E), _LEAST)

        highest = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = ()
        for slab in tl.static_range(len(VALUES)):
            sums = sums + (zeros_of(VALUES, slab, ROWS),)
        for begin in tl.range(first_tile, last_tile, copies):
            end = tl.minimum(begin + copies, last_tile)
            own_tile = begin + i // QUERIES
            queries = mapped_queries(
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
                ASM,
            )
            # A group of one tile is no loop: its bounds and what it carries would be instructions. The others are loops
            # over conditions, for into those over ranges Triton moves what brings queries and weights to their lanes.
            if copies == 1:
                scored = _tile_scores(
                    queries[1:], key_words, key_slabs, key_tables, key_table, row_of_slabs,
                    first_column_of(tl.minimum(end, last_tile - 1), columns, T), columns, one,
                    T, ROWS, SHORT, KEYS, DTYPE, PRECISION, ASM,
                )  # fmt: skip
                scores = scored[0]
                key_words = scored[1:]
            else:
                scores = tl.zeros((ROWS, T), tl.float32)
                tile = begin
                while tile < end:
                    if ASKS > 0 and (tile - begin) % ASKS == 0:
                        ask_for(key_slabs, row_of_slabs, (tile + AHEAD) * T, last_column, ASKS * T, KEYS, ASM)
                    scored = _tile_scores(
                        queries[1:], key_words, key_slabs, key_tables, key_table, row_of_slabs,
                        first_column_of(tl.minimum(tile + 1, last_tile - 1), columns, T), columns, one,
                        T, ROWS, SHORT, KEYS, DTYPE, PRECISION, ASM,
                    )  # fmt: skip
                    scores = tl.where((own_tile == tile)[:, None], scored[0], scores)
                    key_words = scored[1:]
                    tile += 1
            # All of most groups is seen.
            partly = (begin + copies > last_tile) | ((begin + copies) * T > length)
            for slot in tl.static_range(SLOTS):
                partly = partly | ((hidden[slot] >= begin * T) & (hidden[slot] < (begin + copies) * T))
            if mask_ptr is not None or partly:
                own_first = _not_ahead(own_tile * T, ASM)
                column = first_column_of(own_tile, columns, T)[:, None] + tl.arange(0, T)[None, :]
                seen = (known & (own_tile < end))[:, None] & (column >= own_first[:, None]) & (column < length)
                for slot in tl.static_range(SLOTS):
                    seen = seen & (column != hidden[slot])
                if mask_ptr is not None:
                    mask_at = mask_ptr + batch[:, None].to(tl.int64) * stride_mask + column
                    seen = seen & (tl.load(mask_at, mask=seen, other=0) != 0)
                scores = tl.where(seen, scores, float("-inf"))
            lacking = queries[0] * scale
            peak = tl.maximum(highest, tl.max(scores, 1) * scale + lacking)
            keep = _exp2(highest - peak, ASM)
            weights = _exp2(scores * scale[:, None] + (lacking - peak)[:, None], ASM)
            total = total * keep + tl.sum(weights, 1)
            highest = peak
            weights = oriented(in_fours(weights.to(DTYPE)))
            kept = ()
            for slab in tl.static_range(len(VALUES)):
                kept = kept + (sums[slab] * keep[:, None],)
            sums = kept
            if copies == 1:
                summed = _tile_sums(
                    weights, None, sums, value_words, value_slabs, value_tables, value_table, row_of_slabs,
                    first_column_of(tl.minimum(end, last_tile - 1), columns, T), columns,
                    T, ROWS, SHORT, VALUES, DTYPE, PRECISION, ASM,
                )  # fmt: skip
                sums = summed[: len(VALUES)]
                value_words = summed[len(VALUES) :]
            else:
                tile = begin
                while tile < end:
                    if ASKS > 0 and (tile - begin) % ASKS == 0:
                        ask_for(value_slabs, row_of_slabs, (tile + AHEAD) * T, last_column, ASKS * T, VALUES, ASM)
                    summed = _tile_sums(
                        weights, (own_tile == tile)[:, None], sums, value_words, value_slabs, value_tables, value_table,
                        row_of_slabs, first_column_of(tl.minimum(tile + 1, last_tile - 1), columns, T), columns,
                        T, ROWS, SHORT, VALUES, DTYPE, PRECISION, ASM,
                    )  # fmt: skip
                    sums = summed[: len(VALUES)]
                    value_words = summed[len(VALUES) :]
                    tile += 1

        out = (place * most_parts + part) * num_rows
        query = row_tile * QUERIES + tl.arange(0, QUERIES)
        by_copy = tl.reshape(highest, (copies, QUERIES))
        peak = tl.max(by_copy, 0)
        keep = _exp2(by_copy - peak[None, :], ASM)
        start = 0
        for slab in tl.static_range(len(VALUES)):
            joined = tl.sum(_by_copy(sums[slab], QUERIES, ROWS, VALUES, slab) * keep[:, :, None], 0)
            sums_at = partial_ptr + (out + query)[:, None] * VALUE_SIZE + start + places_of(VALUES, slab)[None, :]
            tl.store(sums_at, joined, mask=(query < num_rows)[:, None])
            start += VALUES[slab][4]
        tl.store(highest_ptr + out + query, peak, mask=query < num_rows)
        joined_total = tl.sum(tl.reshape(total, (copies, QUERIES)) * keep, 0)
        tl.store(total_ptr + out + query, joined_total, mask=query < num_rows)

        # Divisions are slow: the next item is counted up to. It begins here, so that this is its first part.
        part = part * 0
        row_tile = tl.where(row_tile + 1 == row_tiles, 0, row_tile + 1)
        head = tl.where(row_tile > 0, head, head + 1)
        context = tl.where(head == num_heads, context + 1, context)
        head = tl.where(head == num_heads, 0, head)
